// Four ranks each load their part of every tensor; the joined parts must equal the whole tensors. Then
// each rank loads whole tensors that no other rank loads; together they must be all tensors.

#include <onelayer.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr std::uint32_t ranks = 4;

using Bytes = std::vector<std::uint8_t>;

struct Loaded {
  std::vector<std::int64_t> shape;
  std::size_t element_bytes;
  Bytes bytes;
};

void expect(bool is_so, const char *what) {
  if (!is_so) {
    std::fprintf(stderr, "%s: %s\n", what, ol_last_error());
    std::exit(1);
  }
}

Loaded copy(const DLTensor &tensor) {
  Loaded loaded;
  loaded.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  loaded.element_bytes = tensor.dtype.bits / 8;
  std::size_t len = loaded.element_bytes;
  for (const std::int64_t dimension : loaded.shape) {
    len *= static_cast<std::size_t>(dimension);
  }
  const auto *bytes = static_cast<const std::uint8_t *>(tensor.data);
  loaded.bytes.assign(bytes, bytes + len);
  return loaded;
}

std::map<std::string, Loaded> load(const ol_checkpoint *checkpoint, std::uint32_t rank, std::uint32_t of, int mode) {
  std::map<std::string, Loaded> tensors;
  ol_options options;
  ol_stream *stream = nullptr;
  ol_layer *layer = nullptr;
  ol_status status;
  expect(ol_options_init(&options, sizeof options) == OL_OK, "defaults");
  options.rank = rank;
  options.ranks = of;
  options.ranks_mode = mode;
  expect(ol_stream_start(checkpoint, &options, &stream) == OL_OK, "start");
  while ((status = ol_next_layer(stream, &layer)) == OL_OK) {
    for (std::size_t i = 0; i < ol_layer_len(layer); i++) {
      const char *name = nullptr;
      DLManagedTensorVersioned *tensor = nullptr;
      expect(ol_layer_tensor(layer, i, &name, &tensor) == OL_OK, "tensor");
      tensors.emplace(name, copy(tensor->dl_tensor));
      tensor->deleter(tensor);
    }
    ol_layer_free(layer);
  }
  expect(status == OL_END, "end");
  ol_stream_free(stream);
  return tensors;
}

// Joins the parts along the dimension in which they are shorter; returns any part if all are whole.
Bytes together(const Loaded &whole, const std::vector<const Loaded *> &parts) {
  std::size_t axis = 0;
  while (axis < whole.shape.size() && parts[0]->shape[axis] == whole.shape[axis]) {
    axis++;
  }
  if (axis == whole.shape.size()) {
    return parts[0]->bytes;
  }
  std::size_t outer = 1;
  for (std::size_t i = 0; i < axis; i++) {
    outer *= static_cast<std::size_t>(whole.shape[i]);
  }
  Bytes bytes;
  for (std::size_t row = 0; row < outer; row++) {
    for (const Loaded *part : parts) {
      const std::size_t run = part->bytes.size() / outer;
      const auto start = part->bytes.begin() + static_cast<std::ptrdiff_t>(row * run);
      bytes.insert(bytes.end(), start, start + static_cast<std::ptrdiff_t>(run));
    }
  }
  return bytes;
}

}  // namespace

int main(int count, char **words) {
  if (count != 2) {
    return 2;
  }
  ol_checkpoint *checkpoint = nullptr;
  expect(ol_open(words[1], nullptr, &checkpoint) == OL_OK, "open");
  const auto whole = load(checkpoint, 0, 1, OL_RANKS_SPLIT);
  std::vector<std::map<std::string, Loaded>> split, share;
  for (std::uint32_t rank = 0; rank < ranks; rank++) {
    split.push_back(load(checkpoint, rank, ranks, OL_RANKS_SPLIT));
    share.push_back(load(checkpoint, rank, ranks, OL_RANKS_SHARE));
  }
  std::size_t divided = 0;
  for (const auto &[name, tensor] : whole) {
    std::vector<const Loaded *> parts;
    std::size_t readers = 0;
    for (std::uint32_t rank = 0; rank < ranks; rank++) {
      expect(split[rank].count(name) == 1, "every rank has a part of every tensor");
      parts.push_back(&split[rank].at(name));
      const auto shared = share[rank].find(name);
      if (shared != share[rank].end()) {
        readers++;
        expect(shared->second.bytes == tensor.bytes, "a share is whole");
      }
    }
    expect(readers == 1, "one rank reads it");
    expect(together(tensor, parts) == tensor.bytes, name.c_str());
    divided += parts[0]->bytes.size() < tensor.bytes.size();
  }
  ol_close(checkpoint);
  std::printf("%zu of %zu tensors are divided\n", divided, whole.size());
  return 0;
}
