/* Prints a checksum of every tensor of a checkpoint. Streamed and single reads must be equal.
 *
 * With the second argument `leak` the program leaks a tensor, which leak checks must find.
 */
#include <inttypes.h>
#include <onelayer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, ol_last_error());
  return 1;
}

/* FNV-1a, 64 bits. */
static uint64_t checksum(const uint8_t *bytes, size_t len) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < len; i++) {
    hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
  }
  return hash;
}

static size_t len_of(const DLTensor *tensor) {
  size_t bits = (size_t)tensor->dtype.bits * tensor->dtype.lanes;
  for (int32_t i = 0; i < tensor->ndim; i++) {
    bits *= (size_t)tensor->shape[i];
  }
  return (bits + 7) / 8;
}

static int is_contiguous(const DLTensor *tensor) {
  int64_t stride = 1;
  for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
    if (tensor->strides[i] != stride) {
      return 0;
    }
    stride *= tensor->shape[i] > 0 ? tensor->shape[i] : 1;
  }
  return 1;
}

/* The description before the load must match the loaded tensor. */
static int agrees(const ol_checkpoint *checkpoint, const char *name, const DLTensor *tensor) {
  ol_tensor info;
  size_t index;
  info.struct_size = sizeof info;
  if (ol_find_tensor(checkpoint, name, &index) != OL_OK || ol_tensor_info(checkpoint, index, &info) != OL_OK) {
    return 0;
  }
  return strcmp(info.name, name) == 0 && info.name_bytes == strlen(name) && strlen(info.dtype) > 0 &&
         info.dimensions == (size_t)tensor->ndim && info.len_bytes == len_of(tensor) &&
         info.element.code == tensor->dtype.code && info.element.bits == tensor->dtype.bits &&
         info.element.lanes == tensor->dtype.lanes;
}

/* Reads the tensor again, whole and in two parts, and compares. */
static int reads_the_same(const ol_checkpoint *checkpoint, const char *name, const uint8_t *expected, size_t len) {
  uint8_t *bytes = malloc(len + 1);
  size_t half = len / 2;
  int same = bytes != NULL && ol_read_into(checkpoint, name, bytes, len + 1) == OL_OK &&
             memcmp(bytes, expected, len) == 0;
  if (same) {
    memset(bytes, 0, len);
    same = ol_read_part(checkpoint, name, 0, bytes, half) == OL_OK &&
           ol_read_part(checkpoint, name, half, bytes + half, len - half) == OL_OK &&
           memcmp(bytes, expected, len) == 0;
  }
  free(bytes);
  return same;
}

static int print_tensor(const ol_checkpoint *checkpoint, const char *name, const DLTensor *tensor) {
  static const uint8_t nothing[1];
  const uint8_t *bytes = tensor->data == NULL ? nothing : (const uint8_t *)tensor->data + tensor->byte_offset;
  size_t len = len_of(tensor);
  if (tensor->device.device_type != kDLCPU || !is_contiguous(tensor) || !agrees(checkpoint, name, tensor)) {
    return fail("a tensor is not what it was said to be");
  }
  if (!reads_the_same(checkpoint, name, bytes, len)) {
    return fail("a tensor that is read alone is not the same");
  }
  printf("%016" PRIx64 " %zu %s\n", checksum(bytes, len), len, name);
  return 0;
}

static int print_layer(const ol_checkpoint *checkpoint, const ol_layer *layer, int *leaks) {
  for (size_t i = 0; i < ol_layer_len(layer); i++) {
    const char *name;
    DLManagedTensorVersioned *tensor;
    int failed;
    if (ol_layer_tensor(layer, i, &name, &tensor) != OL_OK) {
      return fail("no tensor");
    }
    failed = print_tensor(checkpoint, name, &tensor->dl_tensor);
    if (*leaks) {
      *leaks = 0;
    } else {
      tensor->deleter(tensor);
    }
    if (failed) {
      return failed;
    }
  }
  return 0;
}

static int print_checkpoint(const ol_checkpoint *checkpoint, const ol_options *options, int leaks) {
  ol_stream *stream;
  ol_layer *layer;
  ol_report report;
  ol_status status;
  int failed = 0;
  if (ol_stream_start(checkpoint, options, &stream) != OL_OK) {
    return fail("no stream");
  }
  while ((status = ol_next_layer(stream, &layer)) == OL_OK) {
    failed |= print_layer(checkpoint, layer, &leaks);
    ol_layer_free(layer);
  }
  report.struct_size = sizeof report;
  if (status != OL_END || ol_stream_report(stream, &report) != OL_OK ||
      report.layers != ol_stream_len(stream) || report.planned_host_bytes > options->host_budget_bytes) {
    failed = fail("no end");
  }
  ol_stream_free(stream);
  return failed;
}

int main(int count, char **words) {
  ol_checkpoint *checkpoint;
  ol_options options;
  uint64_t least_bytes;
  char *plan;
  int failed;
  if (count < 2 || ol_abi_version() < OL_ABI_VERSION) {
    return 2;
  }
  if (ol_open(words[1], NULL, &checkpoint) != OL_OK) {
    return fail("not opened");
  }
  /* The smallest budget, to the byte. */
  ol_options_init(&options, sizeof options);
  if (ol_min_budget(checkpoint, &options, &least_bytes) != OL_OK) {
    return fail("no least budget");
  }
  options.host_budget_bytes = least_bytes;
  if (ol_plan_text(checkpoint, &options, &plan) != OL_OK || strlen(plan) < 100) {
    return fail("no plan");
  }
  ol_text_free(plan);
  failed = print_checkpoint(checkpoint, &options, count > 2 && strcmp(words[2], "leak") == 0);
  ol_close(checkpoint);
  return failed;
}
