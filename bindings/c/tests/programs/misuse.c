/* Misuse of the library: each case must return a status with a text, without a crash.
 *
 * The argument is a checkpoint of several layers. The program prints the texts.
 */
#include <onelayer.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

/* Checks the status, and that a failure has a text. */
static void expect(int line, ol_status expected, ol_status found, const char *part) {
  const char *text = found > OL_NOT_YET ? ol_last_error() : "";
  printf("%d: %d %s\n", line, (int)found, text);
  if (found != expected || strstr(text, part) == NULL) {
    fprintf(stderr, "line %d: status %d instead of %d, \"%s\" without \"%s\"\n", line, (int)found, (int)expected, text, part);
    failures++;
  }
}

static void expect_true(int line, int is_so) {
  if (!is_so) {
    fprintf(stderr, "line %d is not so\n", line);
    failures++;
  }
}

#define EXPECT(status, call, part) expect(__LINE__, status, call, part)
#define EXPECT_TRUE(is_so) expect_true(__LINE__, is_so)

static void nulls(const char *path) {
  ol_checkpoint *checkpoint;
  ol_stream *stream;
  ol_layer *layer;
  ol_options options;
  ol_tensor info;
  ol_report report;
  DLManagedTensorVersioned *tensor;
  uint64_t bytes;
  size_t index;
  char *text;
  info.struct_size = sizeof info;
  report.struct_size = sizeof report;
  EXPECT(OL_EINVAL, ol_options_init(NULL, sizeof options), "ol_options is null");
  EXPECT(OL_EINVAL, ol_open(NULL, NULL, &checkpoint), "source is null");
  EXPECT_TRUE(checkpoint == NULL);
  EXPECT(OL_EINVAL, ol_open(path, NULL, NULL), "out is null");
  EXPECT(OL_EINVAL, ol_stream_start(NULL, NULL, &stream), "checkpoint is null");
  EXPECT_TRUE(stream == NULL);
  EXPECT(OL_EINVAL, ol_next_layer(NULL, &layer), "stream is null");
  EXPECT_TRUE(layer == NULL);
  EXPECT(OL_EINVAL, ol_next_layer_within(NULL, 0, &layer), "stream is null");
  EXPECT(OL_EINVAL, ol_stream_report(NULL, &report), "stream is null");
  EXPECT(OL_EINVAL, ol_stream_progress(NULL, &bytes, &bytes), "stream is null");
  EXPECT(OL_EINVAL, ol_layer_tensor(NULL, 0, NULL, &tensor), "layer is null");
  EXPECT_TRUE(tensor == NULL);
  EXPECT(OL_EINVAL, ol_layer_find(NULL, "a", &tensor), "layer is null");
  EXPECT(OL_EINVAL, ol_layer_wait(NULL), "layer is null");
  EXPECT(OL_EINVAL, ol_tensor_info(NULL, 0, &info), "checkpoint is null");
  EXPECT(OL_EINVAL, ol_find_tensor(NULL, "a", &index), "checkpoint is null");
  EXPECT(OL_EINVAL, ol_min_budget(NULL, NULL, &bytes), "checkpoint is null");
  EXPECT(OL_EINVAL, ol_plan_text(NULL, NULL, &text), "checkpoint is null");
  EXPECT(OL_EINVAL, ol_read_into(NULL, "a", &bytes, sizeof bytes), "checkpoint is null");
  EXPECT_TRUE(ol_tensor_count(NULL) == 0 && ol_stream_len(NULL) == 0 && ol_layer_len(NULL) == 0);
  EXPECT_TRUE(ol_layer_name(NULL) == NULL && ol_layer_resident_bytes(NULL) == 0);
  ol_cancel(NULL);
  ol_close(NULL);
  ol_stream_free(NULL);
  ol_layer_free(NULL);
  ol_text_free(NULL);
}

/* A program built with a longer structure. */
struct longer {
  ol_options options;
  uint64_t unknown;
};

static void structures(const char *path) {
  ol_checkpoint *checkpoint;
  ol_options options;
  struct longer longer;
  ol_tensor info;
  memset(&options, 0, sizeof options);
  EXPECT(OL_EINVAL, ol_open(path, &options, &checkpoint), "struct_size of an ol_options is 0");
  options.struct_size = (size_t)-1;
  EXPECT(OL_EINVAL, ol_open(path, &options, &checkpoint), "struct_size");
  EXPECT(OL_EINVAL, ol_options_init(&options, 3), "struct_size of an ol_options is 3");
  memset(&longer, 0, sizeof longer);
  EXPECT(OL_OK, ol_options_init(&longer.options, sizeof longer), "");
  EXPECT_TRUE(longer.options.struct_size == sizeof longer);
  EXPECT(OL_OK, ol_open(path, &longer.options, &checkpoint), "");
  info.struct_size = 1;
  EXPECT(OL_EINVAL, ol_tensor_info(checkpoint, 0, &info), "struct_size of an ol_tensor is 1");
  info.struct_size = sizeof info;
  EXPECT(OL_EINVAL, ol_tensor_info(checkpoint, ol_tensor_count(checkpoint), &info), "there is no tensor");
  EXPECT(OL_EINVAL, ol_tensor_info(checkpoint, 0, NULL), "ol_tensor is null");
  ol_close(checkpoint);
  longer.unknown = 1;
  EXPECT(OL_EUNSUPPORTED, ol_open(path, &longer.options, &checkpoint), "beyond the");
}

static void values(const char *path, const char *program) {
  ol_checkpoint *checkpoint;
  ol_stream *stream;
  ol_options options;
  EXPECT(OL_ENOTFOUND, ol_open("/nonexistent/checkpoint", NULL, &checkpoint), "/nonexistent/checkpoint");
  EXPECT(OL_EFORMAT, ol_open(program, NULL, &checkpoint), program);
  EXPECT(OL_OK, ol_open(path, NULL, &checkpoint), "");
  ol_options_init(&options, sizeof options);
  options.host_budget_bytes = 1;
  EXPECT(OL_EBUDGET, ol_stream_start(checkpoint, &options, &stream), "use ");
  ol_options_init(&options, sizeof options);
  options.device_type = 99;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "no device of type 99");
  options.device_type = OL_DEVICE_CPU;
  options.device_id = -1;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "the number -1");
  options.device_id = 0;
  options.io_mode = 17;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "io_mode");
  options.io_mode = OL_IO_AUTO;
  options.hand_out = 2;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "hand_out");
  options.hand_out = OL_HAND_OUT_WHEN_COMPLETE;
  options.ranks_mode = 2;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "ranks_mode");
  options.ranks_mode = OL_RANKS_SPLIT;
  options.rank = 4;
  options.ranks = 4;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "rank 4 of 4");
  options.rank = 0;
  options.ranks = 0;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "rank 0 of 0");
  options.ranks = 7;
  EXPECT(OL_EINVAL, ol_stream_start(checkpoint, &options, &stream), "7 ranks cannot divide");
  EXPECT_TRUE(stream == NULL);
  ol_close(checkpoint);
}

static void targets(const char *path) {
  ol_checkpoint *checkpoint;
  ol_indices indices[1] = {{1, 0}};
  ol_tensor info;
  char small[1];
  info.struct_size = sizeof info;
  EXPECT(OL_OK, ol_open(path, NULL, &checkpoint), "");
  EXPECT(OL_OK, ol_tensor_info(checkpoint, 0, &info), "");
  EXPECT(OL_EINVAL, ol_read_into(checkpoint, info.name, small, sizeof small), "target_bytes is 1");
  EXPECT(OL_EINVAL, ol_read_into(checkpoint, info.name, NULL, (size_t)info.len_bytes), "target is null");
  EXPECT(OL_EINVAL, ol_read_part(checkpoint, info.name, info.len_bytes, small, 1), info.name);
  EXPECT(OL_EINVAL, ol_read_part(checkpoint, info.name, UINT64_MAX, small, 1), info.name);
  EXPECT(OL_EINVAL, ol_read_part(checkpoint, info.name, 0, small, (size_t)-1), "more than any address space");
  EXPECT(OL_EINVAL, ol_read_slice(checkpoint, info.name, indices, 1, small, 1), info.name);
  EXPECT(OL_EINVAL, ol_read_slice(checkpoint, info.name, NULL, 1, small, 1), "indices is null");
  EXPECT(OL_EINVAL, ol_read_slice(checkpoint, info.name, indices, (size_t)-1, small, 1), "dimensions");
  EXPECT(OL_ENOTFOUND, ol_read_into(checkpoint, "no.such.tensor", small, 1), "no.such.tensor");
  EXPECT(OL_EINVAL, ol_read_into(checkpoint, "\xff\xfe", small, 1), "not UTF-8");
  EXPECT(OL_EINVAL, ol_read_into(checkpoint, NULL, small, 1), "name is null");
  ol_close(checkpoint);
}

static void order(const char *path) {
  ol_checkpoint *checkpoint;
  ol_stream *stream;
  ol_layer *first;
  ol_layer *layer;
  ol_options options;
  DLManagedTensorVersioned *tensor;
  ol_options_init(&options, sizeof options);
  options.window_layers = 1;
  options.stall_timeout_ms = 50;
  EXPECT(OL_OK, ol_open(path, NULL, &checkpoint), "");
  EXPECT(OL_OK, ol_stream_start(checkpoint, &options, &stream), "");
  ol_close(checkpoint);
  EXPECT(OL_OK, ol_next_layer(stream, &first), "");
  EXPECT(OL_EINVAL, ol_layer_tensor(first, ol_layer_len(first), NULL, &tensor), "there is no tensor");
  EXPECT(OL_ENOTFOUND, ol_layer_find(first, "no.such.tensor", &tensor), "no.such.tensor");
  EXPECT(OL_NOT_YET, ol_next_layer_within(stream, 0, &layer), "");
  EXPECT(OL_ESTALLED, ol_next_layer(stream, &layer), "the window is full");
  EXPECT_TRUE(layer == NULL);
  EXPECT(OL_END, ol_next_layer(stream, &layer), "");
  EXPECT(OL_END, ol_next_layer(stream, &layer), "");
  ol_stream_free(stream);
  /* A layer outlives its stream, and a tensor its layer. */
  EXPECT(OL_OK, ol_layer_tensor(first, 0, NULL, &tensor), "");
  ol_layer_free(first);
  tensor->deleter(tensor);

  /* Dropped bytes cannot be exported. */
  ol_options_init(&options, sizeof options);
  options.device_type = OL_DEVICE_NONE;
  EXPECT(OL_OK, ol_open(path, NULL, &checkpoint), "");
  EXPECT(OL_OK, ol_stream_start(checkpoint, &options, &stream), "");
  EXPECT(OL_OK, ol_next_layer(stream, &layer), "");
  EXPECT(OL_EUNSUPPORTED, ol_layer_tensor(layer, 0, NULL, &tensor), "loaded to none");
  ol_layer_free(layer);
  ol_stream_free(stream);
  ol_close(checkpoint);
}

int main(int count, char **words) {
  if (count != 2) {
    return 2;
  }
  EXPECT_TRUE(strlen(ol_last_error()) == 0);
  nulls(words[1]);
  structures(words[1]);
  values(words[1], words[0]);
  targets(words[1]);
  order(words[1]);
  return failures == 0 ? 0 : 1;
}
