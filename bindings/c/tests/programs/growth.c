/* Streams a checkpoint with a budget, and prints the peak growth of resident memory in bytes.
 *
 * growth CHECKPOINT BUDGET_MIB host|none
 */
#include <inttypes.h>
#include <onelayer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A line of /proc/self/status, in bytes: VmHWM is peak resident memory, VmRSS current. */
static uint64_t status_bytes(const char *key) {
  char line[256];
  unsigned long kib = 0;
  FILE *file = fopen("/proc/self/status", "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, key, strlen(key)) == 0) {
      kib = strtoul(line + strlen(key) + 1, NULL, 10);
    }
  }
  if (file != NULL) {
    fclose(file);
  }
  return (uint64_t)kib * 1024;
}

int main(int count, char **words) {
  ol_options options;
  ol_checkpoint *checkpoint;
  ol_stream *stream;
  ol_layer *layer;
  ol_status status;
  uint64_t before_bytes;
  if (count != 4) {
    return 2;
  }
  before_bytes = status_bytes("VmRSS");
  ol_options_init(&options, sizeof options);
  options.host_budget_bytes = (uint64_t)strtoul(words[2], NULL, 10) << 20;
  options.device_type = strcmp(words[3], "none") == 0 ? OL_DEVICE_NONE : OL_DEVICE_CPU;
  options.window_layers = 1;
  if (ol_open(words[1], &options, &checkpoint) != OL_OK ||
      ol_stream_start(checkpoint, &options, &stream) != OL_OK) {
    fprintf(stderr, "%s\n", ol_last_error());
    return 1;
  }
  while ((status = ol_next_layer(stream, &layer)) == OL_OK) {
    ol_layer_free(layer);
  }
  ol_stream_free(stream);
  ol_close(checkpoint);
  printf("%" PRIu64 "\n", status_bytes("VmHWM") - before_bytes);
  return status == OL_END ? 0 : 1;
}
