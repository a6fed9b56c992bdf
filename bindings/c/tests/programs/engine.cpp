// Acts like an inference engine in C++: RAII owners, tensors that outlive layer and stream and are
// deleted on another thread, waits with a time limit, cancelling, slices. Prints the same checksums as
// checksums.c.

#include <onelayer.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

struct Free {
  void operator()(ol_checkpoint *checkpoint) const { ol_close(checkpoint); }
  void operator()(ol_stream *stream) const { ol_stream_free(stream); }
  void operator()(ol_layer *layer) const { ol_layer_free(layer); }
  void operator()(DLManagedTensorVersioned *tensor) const { tensor->deleter(tensor); }
};

template <typename T>
using Owned = std::unique_ptr<T, Free>;
using Tensor = Owned<DLManagedTensorVersioned>;

[[noreturn]] void fail(const char *what) {
  std::fprintf(stderr, "%s: %s\n", what, ol_last_error());
  std::exit(1);
}

void expect(bool is_so, const char *what) {
  if (!is_so) {
    fail(what);
  }
}

Owned<ol_checkpoint> open(const char *path) {
  ol_checkpoint *checkpoint = nullptr;
  expect(ol_open(path, nullptr, &checkpoint) == OL_OK, "open");
  return Owned<ol_checkpoint>(checkpoint);
}

Owned<ol_stream> start(const ol_checkpoint *checkpoint, const ol_options &options) {
  ol_stream *stream = nullptr;
  expect(ol_stream_start(checkpoint, &options, &stream) == OL_OK, "start");
  return Owned<ol_stream>(stream);
}

ol_options defaults() {
  ol_options options;
  expect(ol_options_init(&options, sizeof options) == OL_OK, "defaults");
  return options;
}

// Waits in slices of a millisecond.
Owned<ol_layer> next(const ol_stream *stream) {
  ol_layer *layer = nullptr;
  ol_status status = OL_NOT_YET;
  while (status == OL_NOT_YET) {
    status = ol_next_layer_within(stream, 1, &layer);
  }
  expect(status == OL_OK || status == OL_END, "next");
  expect((status == OL_OK) == (layer != nullptr), "a layer or an end");
  return Owned<ol_layer>(layer);
}

std::size_t len_of(const DLTensor &tensor) {
  std::size_t bits = std::size_t{tensor.dtype.bits} * tensor.dtype.lanes;
  for (std::int32_t i = 0; i < tensor.ndim; i++) {
    bits *= static_cast<std::size_t>(tensor.shape[i]);
  }
  return (bits + 7) / 8;
}

std::uint64_t checksum(const DLTensor &tensor) {
  std::uint64_t hash = 0xcbf29ce484222325;
  const auto *bytes = static_cast<const std::uint8_t *>(tensor.data);
  for (std::size_t i = 0; i < len_of(tensor); i++) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}

// Loads everything, then keeps only the tensors.
std::vector<std::pair<std::string, Tensor>> load(const char *path) {
  std::vector<std::pair<std::string, Tensor>> tensors;
  ol_options options = defaults();
  options.window_layers = OL_WINDOW_ALL;
  const auto checkpoint = open(path);
  const auto stream = start(checkpoint.get(), options);
  while (const auto layer = next(stream.get())) {
    for (std::size_t i = 0; i < ol_layer_len(layer.get()); i++) {
      const char *name = nullptr;
      DLManagedTensorVersioned *tensor = nullptr;
      expect(ol_layer_tensor(layer.get(), i, &name, &tensor) == OL_OK, "tensor");
      tensors.emplace_back(name, tensor);
      expect(ol_layer_find(layer.get(), name, &tensor) == OL_OK, "tensor by name");
      expect(Tensor(tensor)->dl_tensor.data == tensors.back().second->dl_tensor.data, "the same tensor");
    }
  }
  std::uint64_t done = 0, total = 1;
  expect(ol_stream_progress(stream.get(), &done, &total) == OL_OK && done == total, "all of it");
  return tensors;
}

// Another thread cancels while this one waits for layers.
void cancel(const char *path) {
  const auto checkpoint = open(path);
  ol_options options = defaults();
  options.window_layers = 1;
  options.prefetch_layers = 0;
  const auto stream = start(checkpoint.get(), options);
  const auto kept = next(stream.get());  // fills the window: no further layer can arrive
  std::thread other([&stream] { ol_cancel(stream.get()); });
  ol_layer *layer = nullptr;
  const ol_status status = ol_next_layer(stream.get(), &layer);
  other.join();
  expect(status == OL_ECANCELLED && layer == nullptr, "cancelled");
  expect(std::strstr(ol_last_error(), "cancelled") != nullptr, "says so");
  expect(ol_next_layer(stream.get(), &layer) == OL_END, "the end after a failure");
}

// The second half of the rows of a matrix, and the first column.
void slices(const char *path, const std::string &name, const DLTensor &tensor) {
  const auto checkpoint = open(path);
  const auto rows = static_cast<std::uint64_t>(tensor.shape[0]);
  const std::size_t row_bytes = len_of(tensor) / rows;
  const std::size_t element_bytes = tensor.dtype.bits / 8;
  const auto *bytes = static_cast<const std::uint8_t *>(tensor.data);
  const ol_indices half[] = {{rows / 2, rows}};
  std::vector<std::uint8_t> found((rows - rows / 2) * row_bytes);
  expect(ol_read_slice(checkpoint.get(), name.c_str(), half, 1, found.data(), found.size()) == OL_OK, "rows");
  expect(std::memcmp(found.data(), bytes + rows / 2 * row_bytes, found.size()) == 0, "the rows");
  const ol_indices column[] = {{0, rows}, {0, 1}};
  found.resize(rows * element_bytes);
  expect(ol_read_slice(checkpoint.get(), name.c_str(), column, 2, found.data(), found.size()) == OL_OK, "column");
  for (std::uint64_t row = 0; row < rows; row++) {
    const bool same = std::memcmp(&found[row * element_bytes], bytes + row * row_bytes, element_bytes) == 0;
    expect(same, "the column");
  }
}

}  // namespace

int main(int count, char **words) {
  if (count != 2) {
    return 2;
  }
  auto tensors = load(words[1]);
  for (const auto &[name, tensor] : tensors) {
    const DLTensor &seen = tensor->dl_tensor;
    std::printf("%016" PRIx64 " %zu %s\n", checksum(seen), len_of(seen), name.c_str());
  }
  for (const auto &[name, tensor] : tensors) {
    if (tensor->dl_tensor.ndim == 2) {
      slices(words[1], name, tensor->dl_tensor);
      break;
    }
  }
  std::thread([&tensors] { tensors.clear(); }).join();
  cancel(words[1]);
  return 0;
}
