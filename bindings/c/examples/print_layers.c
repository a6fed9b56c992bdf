/* Streams a checkpoint layer by layer and prints the tensors of each layer.
 *
 *   cc -std=c99 print_layers.c $(pkg-config --cflags --libs onelayer) -o print_layers
 */
#include <inttypes.h>
#include <onelayer.h>
#include <stdio.h>

static void print_tensor(const char *name, const DLTensor *tensor) {
  printf("  %s: type %u of %u bits, shape", name, tensor->dtype.code, tensor->dtype.bits);
  for (int32_t i = 0; i < tensor->ndim; i++) {
    printf(" %" PRId64, tensor->shape[i]);
  }
  printf("\n");
}

/* Returns 1 if a tensor cannot be exported. */
static int print_layer(const ol_layer *layer) {
  printf("%s\n", ol_layer_name(layer));
  for (size_t i = 0; i < ol_layer_len(layer); i++) {
    const char *name;
    DLManagedTensorVersioned *tensor;
    if (ol_layer_tensor(layer, i, &name, &tensor) != OL_OK) {
      return 1;
    }
    print_tensor(name, &tensor->dl_tensor);
    tensor->deleter(tensor);
  }
  return 0;
}

int main(int count, char **words) {
  ol_options options;
  ol_checkpoint *checkpoint = NULL;
  ol_stream *stream = NULL;
  ol_layer *layer = NULL;
  ol_status status;

  if (count != 2) {
    fprintf(stderr, "usage: %s CHECKPOINT\n", words[0]);
    return 2;
  }
  ol_options_init(&options, sizeof options);
  options.host_budget_bytes = 64u << 20;
  if (ol_open(words[1], &options, &checkpoint) == OL_OK) {
    ol_stream_start(checkpoint, &options, &stream);
  }
  if (stream == NULL) {
    fprintf(stderr, "%s\n", ol_last_error());
    ol_close(checkpoint);
    return 1;
  }
  while ((status = ol_next_layer(stream, &layer)) == OL_OK) {
    int failed = print_layer(layer);
    ol_layer_free(layer);
    if (failed) {
      break;
    }
  }
  if (status != OL_END) {
    fprintf(stderr, "%s\n", ol_last_error());
  }
  ol_stream_free(stream);
  ol_close(checkpoint);
  return status == OL_END ? 0 : 1;
}
