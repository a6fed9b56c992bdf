/* Loads onto a CUDA device with a stream of the program, and prints the checksums of checksums.c. The
 * program copies every byte back with the driver, which it opens itself.
 */
#include <dlfcn.h>
#include <inttypes.h>
#include <onelayer.h>
#include <stdio.h>
#include <stdlib.h>

/* Driver handles, as integers of pointer size. */
typedef uintptr_t handle;

static int (*cu_init)(unsigned flags);
static int (*cu_primary_retain)(handle *context, int device);
static int (*cu_primary_release)(int device);
static int (*cu_set_current)(handle context);
static int (*cu_stream_create)(handle *stream, unsigned flags);
static int (*cu_stream_destroy)(handle stream);
static int (*cu_stream_synchronize)(handle stream);
static int (*cu_copy_to_host)(void *target, uint64_t source, size_t len, handle stream);

static void expect(int is_so, const char *what) {
  if (!is_so) {
    fprintf(stderr, "%s: %s\n", what, ol_last_error());
    exit(1);
  }
}

/* Stores a function pointer: C has no other conversion from an object pointer. */
static void find(void *library, const char *name, void *place) {
  void **function = place;
  *function = dlsym(library, name);
  expect(*function != NULL, name);
}

static void open_driver(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  expect(library != NULL, "libcuda.so.1");
  find(library, "cuInit", &cu_init);
  find(library, "cuDevicePrimaryCtxRetain", &cu_primary_retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", &cu_primary_release);
  find(library, "cuCtxSetCurrent", &cu_set_current);
  find(library, "cuStreamCreate", &cu_stream_create);
  find(library, "cuStreamDestroy_v2", &cu_stream_destroy);
  find(library, "cuStreamSynchronize", &cu_stream_synchronize);
  find(library, "cuMemcpyDtoHAsync_v2", &cu_copy_to_host);
}

/* Copies a tensor back in the stream. */
static void print_tensor(const char *name, const DLTensor *tensor, handle stream) {
  size_t len = (size_t)tensor->dtype.bits / 8;
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  uint8_t *bytes;
  for (int32_t i = 0; i < tensor->ndim; i++) {
    len *= (size_t)tensor->shape[i];
  }
  expect(tensor->device.device_type == kDLCUDA && tensor->device.device_id == 0, "a CUDA device");
  bytes = malloc(len);
  expect(bytes != NULL && cu_copy_to_host(bytes, (uintptr_t)tensor->data, len, stream) == 0, "copied");
  expect(cu_stream_synchronize(stream) == 0, "synchronized");
  for (size_t i = 0; i < len; i++) {
    hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
  }
  free(bytes);
  printf("%016" PRIx64 " %zu %s\n", hash, len, name);
}

/* Every second layer waits as a whole and is freed in stream order. */
static void print_layer(const ol_layer *layer, handle stream) {
  int as_a_whole = ol_layer_index(layer) % 2 == 1;
  expect(!as_a_whole || ol_layer_let_wait(layer, stream) == OL_OK, "let wait");
  for (size_t i = 0; i < ol_layer_len(layer); i++) {
    const char *name;
    DLManagedTensorVersioned *tensor;
    expect(ol_layer_tensor_for_stream(layer, i, stream, &name, &tensor) == OL_OK, "tensor");
    print_tensor(name, &tensor->dl_tensor, stream);
    tensor->deleter(tensor);
  }
  expect(!as_a_whole || ol_layer_release_after(layer, stream) == OL_OK, "release after");
}

int main(int count, char **words) {
  ol_options options;
  ol_checkpoint *checkpoint;
  ol_stream *layers;
  ol_layer *layer;
  ol_status status;
  handle context = 0, stream = 0;
  if (count != 2) {
    return 2;
  }
  open_driver();
  expect(cu_init(0) == 0 && cu_primary_retain(&context, 0) == 0 && cu_set_current(context) == 0, "context");
  expect(cu_stream_create(&stream, 1) == 0, "stream");
  ol_options_init(&options, sizeof options);
  options.host_budget_bytes = 6u << 20;
  options.device_type = OL_DEVICE_CUDA;
  options.hand_out = OL_HAND_OUT_AT_ONCE;
  expect(ol_open(words[1], NULL, &checkpoint) == OL_OK, "open");
  expect(ol_stream_start(checkpoint, &options, &layers) == OL_OK, "start");
  ol_close(checkpoint);
  while ((status = ol_next_layer(layers, &layer)) == OL_OK) {
    print_layer(layer, stream);
    ol_layer_free(layer);
  }
  expect(status == OL_END, "end");
  ol_stream_free(layers);
  expect(cu_stream_destroy(stream) == 0 && cu_set_current(0) == 0 && cu_primary_release(0) == 0, "released");
  return 0;
}
