/* Requests a CUDA device that no machine has: unsupported, with a text about the missing part. */
#include <onelayer.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **words) {
  ol_options options;
  ol_checkpoint *checkpoint;
  ol_stream *stream;
  ol_status status;
  if (count != 2 || ol_options_init(&options, sizeof options) != OL_OK) {
    return 2;
  }
  options.device_type = OL_DEVICE_CUDA;
  options.device_id = 9999;
  if (ol_open(words[1], &options, &checkpoint) != OL_OK) {
    return 2;
  }
  status = ol_stream_start(checkpoint, &options, &stream);
  ol_close(checkpoint);
  printf("%d %s\n", (int)status, ol_last_error());
  return status == OL_EUNSUPPORTED && stream == NULL && strlen(ol_last_error()) > 10 ? 0 : 1;
}
