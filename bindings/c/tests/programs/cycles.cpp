// Four threads export and delete tensors of one layer, ten thousand times in all. The program then
// exits with a live tensor, which must not crash in any teardown order.

#include <onelayer.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int threads = 4;
constexpr int cycles_per_thread = 2500;

void expect(bool is_so, const char *what) {
  if (!is_so) {
    std::fprintf(stderr, "%s: %s\n", what, ol_last_error());
    std::exit(1);
  }
}

void delete_tensor(DLManagedTensorVersioned *tensor) { tensor->deleter(tensor); }

void cycle(const ol_layer *layer, std::atomic<int> &deleted) {
  const std::size_t count = ol_layer_len(layer);
  for (int i = 0; i < cycles_per_thread; i++) {
    DLManagedTensorVersioned *tensor = nullptr;
    expect(ol_layer_tensor(layer, static_cast<std::size_t>(i) % count, nullptr, &tensor) == OL_OK, "tensor");
    expect(tensor->dl_tensor.data != nullptr, "bytes");
    delete_tensor(tensor);
    deleted++;
  }
}

// Still alive when the program exits.
DLManagedTensorVersioned *live;

}  // namespace

int main(int count, char **words) {
  if (count != 2) {
    return 2;
  }
  ol_checkpoint *checkpoint = nullptr;
  ol_stream *stream = nullptr;
  ol_layer *layer = nullptr;
  expect(ol_open(words[1], nullptr, &checkpoint) == OL_OK, "open");
  expect(ol_stream_start(checkpoint, nullptr, &stream) == OL_OK, "start");
  // The second layer is a decoder layer with several tensors.
  expect(ol_next_layer(stream, &layer) == OL_OK, "first layer");
  ol_layer_free(layer);
  expect(ol_next_layer(stream, &layer) == OL_OK && ol_layer_len(layer) > 1, "second layer");
  std::atomic<int> deleted{0};
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; i++) {
    workers.emplace_back([layer, &deleted] { cycle(layer, deleted); });
  }
  for (std::thread &worker : workers) {
    worker.join();
  }
  expect(ol_layer_tensor(layer, 0, nullptr, &live) == OL_OK, "a tensor to end with");
  ol_layer_free(layer);
  ol_stream_free(stream);
  ol_close(checkpoint);
  std::printf("%d deleted\n", deleted.load());
  return 0;
}
