#ifndef ONELAYER_H
#define ONELAYER_H

/* Written by cbindgen from the sources of the library: change those, not this. */

#include <stddef.h>
#include <stdint.h>
#include "onelayer_dlpack.h"

/*
 * libonelayer: streams safetensors checkpoints layer by layer inside a host-memory budget.
 *
 * Pointers are null or point to what their type says, which nobody frees meanwhile; texts end with a zero. A null pointer where
 * there must be none is OL_EINVAL. Handles may be used on several threads at once, and are freed once, when nobody uses them;
 * freeing null does nothing.
 */

// Device type: bytes are read and dropped, to measure how fast they come. Others are DLPack's: kDLCPU, kDLCUDA.
#define OL_DEVICE_NONE 0

// Device type: host memory.
#define OL_DEVICE_CPU 1

// Device type: memory of a CUDA device.
#define OL_DEVICE_CUDA 2

// Reads files as the page cache, the file system and the size of each suggest.
#define OL_IO_AUTO 0

// Reads through the page cache.
#define OL_IO_BUFFERED 1

// Reads past the page cache.
#define OL_IO_DIRECT 2

// The same, by io_uring.
#define OL_IO_URING 3

// Reads out of mapped windows.
#define OL_IO_MMAP 4

// Layers come when every byte is in its place.
#define OL_HAND_OUT_WHEN_COMPLETE 0

// Layers come as soon as their copies to the device are queued: see ol_layer_let_wait().
#define OL_HAND_OUT_AT_ONCE 1

// Of several ranks, each loads its part of every tensor, for tensor parallelism: as engines divide common architectures, and
// tensors that no rule knows whole.
#define OL_RANKS_SPLIT 0

// Of several ranks, each loads whole tensors that no other one loads, to hand them on: each byte is read once in all. Where there are more
// ranks than tensors, those without one have nothing to load, which is OL_EINVAL.
#define OL_RANKS_SHARE 1

// A window of all layers.
#define OL_WINDOW_ALL UINT32_MAX

// The version of this interface. It grows when functions or fields are added; a program needs a library of at least the version it
// was built with.
#define OL_ABI_VERSION 1

// What came of a call. What is not OL_OK, OL_END or OL_NOT_YET is a failure: ol_last_error() has its text.
typedef enum {
  // Done.
  OL_OK = 0,
  // There is no further layer.
  OL_END = 1,
  // No layer within the time allowed; ask again.
  OL_NOT_YET = 2,
  // The system refused a file or a thread.
  OL_EIO = 3,
  // The checkpoint is not what the format allows.
  OL_EFORMAT = 4,
  // The budget does not hold what the load needs at least; the text says how much does.
  OL_EBUDGET = 5,
  // The program itself holds all the layers that may be resident, and waited for another one.
  OL_ESTALLED = 6,
  // The device failed.
  OL_EDEVICE = 7,
  // An argument is null, too small, or names nothing there is.
  OL_EINVAL = 8,
  // A fault of the library.
  OL_EPANIC = 9,
  // Not on this machine, not with this build, or not for this type.
  OL_EUNSUPPORTED = 10,
  // No such file, checkpoint or tensor.
  OL_ENOTFOUND = 11,
  // The load was cancelled.
  OL_ECANCELLED = 12,
  // A file is no longer what it was when the checkpoint was opened.
  OL_ECHANGED = 13,
  // Memory that is needed beside the budget cannot be had, on the host or on the device.
  OL_ENOMEM = 14,
} ol_status;

// What a checkpoint on disk holds: headers only. May be used on several threads at once.
typedef struct ol_checkpoint ol_checkpoint;

// A layer that is resident. May be used on several threads at once.
typedef struct ol_layer ol_layer;

// A running load. Its functions may be called on several threads at once; one that waits for a layer holds up others that
// want one, and ol_stream_report().
typedef struct ol_stream ol_stream;

// What a load shall do. ol_options_init() sets the defaults. Wherever options are asked for, null means the defaults.
typedef struct {
  // sizeof(ol_options), as ol_options_init() sets it.
  size_t struct_size;
  // Most host memory that one load may hold beside resident layers, in bytes. 64 MiB by default.
  uint64_t host_budget_bytes;
  // Most memory that resident layers may take on the device, in bytes; 0, the default, is no bound.
  uint64_t device_budget_bytes;
  // How long ol_next_layer() waits while the program itself holds all that may be resident, in milliseconds. 30 000 by
  // default.
  uint64_t stall_timeout_ms;
  // The context (CUcontext) to load in; 0, the default, is the device's primary one. It outlives everything loaded in it.
  uint64_t cuda_context;
  // The stream (CUstream) that copies are queued in; 0, the default, is one of the loader's own; 1 is the legacy default
  // stream. It outlives everything that is loaded with it, and captures no graph.
  uint64_t cuda_stream;
  // Directory of a Hugging Face cache in which ol_open() looks for what is no path but a name, as in "org/name". Null, the
  // default, is none. Nothing is fetched.
  const char *hub_cache;
  // Which revision of it; null, the default, is "main".
  const char *revision;
  // OL_DEVICE_CPU by default, OL_DEVICE_CUDA, or OL_DEVICE_NONE.
  int32_t device_type;
  // The number of the device among those of its type. 0 by default.
  int32_t device_id;
  // Layers resident at once: being filled, ready, and held by the program. 2 by default; OL_WINDOW_ALL is all.
  uint32_t window_layers;
  // Layers read ahead of the one that the program works on. 2 by default.
  uint32_t prefetch_layers;
  // Reads in flight; 0, the default, is what the machine can use.
  uint32_t readers;
  // One of OL_IO_...; OL_IO_AUTO by default.
  int32_t io_mode;
  // One of OL_HAND_OUT_...; OL_HAND_OUT_WHEN_COMPLETE by default.
  int32_t hand_out;
  // Which rank this is of ranks, from 0 on. 0 by default.
  uint32_t rank;
  // How many ranks load the checkpoint, each for itself. 1 by default.
  uint32_t ranks;
  // One of OL_RANKS_...: what a rank loads. OL_RANKS_SPLIT by default.
  int32_t ranks_mode;
} ol_options;

// What a tensor is. Set struct_size before it is filled in.
typedef struct {
  // sizeof(ol_tensor).
  size_t struct_size;
  // Its name; valid until the checkpoint is closed.
  const char *name;
  // Length of the name in bytes. Names may hold zeros.
  size_t name_bytes;
  // Its element type as the file spells it, "BF16"; valid for ever.
  const char *dtype;
  // Elements per dimension, outermost first; valid until the checkpoint is closed.
  const uint64_t *shape;
  // Dimensions.
  size_t dimensions;
  // Its length in bytes.
  uint64_t len_bytes;
  // Its element type as DLPack has it; without lanes where it has none.
  DLDataType element;
  // 0.
  uint32_t reserved;
} ol_tensor;

// What a load did so far. Set struct_size before it is filled in.
typedef struct {
  // sizeof(ol_report).
  size_t struct_size;
  // From the start of the load to its end, or to now, in nanoseconds.
  uint64_t elapsed_ns;
  // Of it, until reading began.
  uint64_t preparing_ns;
  // Time that the program waited for layers.
  uint64_t caller_waited_ns;
  // Time that all readers together spent reading.
  uint64_t reading_ns;
  // Layers that were handed out.
  uint64_t layers;
  // Bytes of tensors that arrived.
  uint64_t tensor_bytes;
  // Bytes moved from files, over-read included.
  uint64_t read_bytes;
  // Host memory that the plan holds at most beside resident layers, in bytes: no more than the budget.
  uint64_t planned_host_bytes;
  // Bytes of it that are pinned for the device.
  uint64_t pinned_bytes;
  // Files that were not read the way that was asked for.
  uint64_t fallbacks;
} ol_report;

// Indices of a dimension: the first one, and the one behind the last.
typedef struct {
  // The first one.
  uint64_t start;
  // The one behind the last.
  uint64_t end;
} ol_indices;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The text of the last failure on the calling thread; an empty text if there was none. Calls that do not fail leave it as it is.
// Valid until the next failure on this thread.
const char *ol_last_error(void);

// Sets the defaults. struct_size is sizeof(ol_options).
//
// OL_EINVAL if options is null, or if struct_size is none.
ol_status ol_options_init(ol_options *options, size_t struct_size);

// OL_ABI_VERSION of the library that is loaded.
uint32_t ol_abi_version(void);

// Opens a checkpoint: a safetensors file, an index, or a directory. Reads and checks headers only. Of the options only hub_cache
// and revision matter here.
//
// *out is null unless it is OL_OK; ol_close() gives it back. OL_ENOTFOUND, OL_EFORMAT, OL_EIO, OL_EINVAL.
ol_status ol_open(const char *source,
                  const ol_options *options,
                  ol_checkpoint **out);

// Closes a checkpoint. Streams, layers and tensors that came from it stay as they are. Null is ignored.
void ol_close(ol_checkpoint *checkpoint);

// Tensors in the checkpoint; 0 for null.
size_t ol_tensor_count(const ol_checkpoint *checkpoint);

// Describes a tensor by its number, from 0 on. The first call makes a table of all names, of their length and nine bytes each, which
// no budget counts.
//
// OL_EINVAL if there is no tensor of that number, or if tensor->struct_size is none.
ol_status ol_tensor_info(const ol_checkpoint *checkpoint,
                         size_t index,
                         ol_tensor *tensor);

// The number of the tensor of that name. OL_ENOTFOUND if there is none.
ol_status ol_find_tensor(const ol_checkpoint *checkpoint, const char *name, size_t *index);

// The smallest host budget that a load with these options works with, in bytes; their own host_budget_bytes is ignored.
ol_status ol_min_budget(const ol_checkpoint *checkpoint,
                        const ol_options *options,
                        uint64_t *bytes);

// What a load with these options would do, as text: how each file is read, and every term of the peak of memory. Reads no
// tensor.
//
// *text is null unless it is OL_OK; ol_text_free() gives it back. OL_EBUDGET if the budget cannot work.
ol_status ol_plan_text(const ol_checkpoint *checkpoint,
                       const ol_options *options,
                       char **text);

// Frees a text. Null is ignored.
void ol_text_free(char *text);

// Starts a load. The checkpoint may be closed before the load is over.
//
// *out is null unless it is OL_OK; ol_stream_free() gives it back. OL_EBUDGET if the budget cannot work, which no byte is read for;
// OL_EUNSUPPORTED if there is no such device.
ol_status ol_stream_start(const ol_checkpoint *checkpoint,
                          const ol_options *options,
                          ol_stream **out);

// The next layer, in execution order. Waits for it.
//
// *out is null unless it is OL_OK; ol_layer_free() gives it back. OL_END after the last one, and after any failure.
// OL_ESTALLED if the program itself holds all that may be resident.
ol_status ol_next_layer(const ol_stream *stream,
                        ol_layer **out);

// The next layer, if it comes within timeout_ms milliseconds; OL_NOT_YET if it does not. It is read meanwhile all the same.
ol_status ol_next_layer_within(const ol_stream *stream,
                               uint64_t timeout_ms,
                               ol_layer **out);

// Cancels a load, from any thread: who waits for a layer gets OL_ECANCELLED, and so does who asks for the next one. Returns at
// once. Null is ignored.
void ol_cancel(const ol_stream *stream);

// Layers of the load; 0 for null.
size_t ol_stream_len(const ol_stream *stream);

// How far a load is: bytes of tensors that have arrived, and of all there are. Waits for nobody.
ol_status ol_stream_progress(const ol_stream *stream, uint64_t *done_bytes, uint64_t *total_bytes);

// What a load did so far; final after OL_END. OL_EINVAL if report->struct_size is none.
ol_status ol_stream_report(const ol_stream *stream, ol_report *report);

// Ends a load: cancels what is not done, and gives its memory back. Layers that were taken stay as they are. Null is ignored.
void ol_stream_free(ol_stream *stream);

// The name of the layer, valid until the layer is freed; null for null.
const char *ol_layer_name(const ol_layer *layer);

// The layer's place in execution order, from 0 on; SIZE_MAX for null.
size_t ol_layer_index(const ol_layer *layer);

// Bytes that the layer takes on its device; 0 for null.
uint64_t ol_layer_resident_bytes(const ol_layer *layer);

// Tensors of the layer; 0 for null.
size_t ol_layer_len(const ol_layer *layer);

// A tensor of the layer by its number, from 0 on, in the order of the file. Waits until its bytes have arrived.
//
// The tensor keeps the layer's memory, whatever becomes of layer, stream and checkpoint, until its deleter has run: once, on any
// thread. *name, which may be null if nobody wants it, is valid until the layer is freed. *out is null unless it is OL_OK.
// OL_EUNSUPPORTED if DLPack has no such type, or if there is no device.
ol_status ol_layer_tensor(const ol_layer *layer,
                          size_t index,
                          const char **name,
                          DLManagedTensorVersioned **out);

// As ol_layer_tensor(), for a program that uses the tensor in a CUDA stream: what is queued there from now on waits until its bytes
// have arrived, and the call returns at once. cuda_stream is a live CUstream of the context that was loaded in.
ol_status ol_layer_tensor_for_stream(const ol_layer *layer,
                                     size_t index,
                                     uint64_t cuda_stream,
                                     const char **name,
                                     DLManagedTensorVersioned **out);

// A tensor of the layer by its name, as ol_layer_tensor(). OL_ENOTFOUND if it is not in this layer.
ol_status ol_layer_find(const ol_layer *layer, const char *name, DLManagedTensorVersioned **out);

// Waits until every byte of the layer is in its place. It is, unless layers are handed out at once.
ol_status ol_layer_wait(const ol_layer *layer);

// Lets what is queued in a CUDA stream from now on wait until the layer is ready. Returns at once. cuda_stream is a live CUstream of
// the context that was loaded in. Without a device nothing happens.
ol_status ol_layer_let_wait(const ol_layer *layer,
                            uint64_t cuda_stream);

// Lets the layer's memory be freed, or used again, only after what is queued in a CUDA stream so far. Freeing the layer and its
// tensors waits for nothing then; otherwise it waits for the whole context. cuda_stream as in ol_layer_let_wait(); whatever
// uses the layer is queued there.
ol_status ol_layer_release_after(const ol_layer *layer,
                                 uint64_t cuda_stream);

// Frees a layer. Its memory is free once the tensors that were taken from it are deleted too. Null is ignored.
void ol_layer_free(ol_layer *layer);

// Reads a whole tensor into host memory of the program's, as the file has it: little-endian, row-major. For engines that ask for
// one tensor at a time. Takes no memory in proportion to it; big tensors are read by several threads.
//
// OL_EINVAL if target has fewer bytes than the tensor; more stay as they are. OL_ENOTFOUND, OL_EIO, OL_ECHANGED; then target
// holds anything.
ol_status ol_read_into(const ol_checkpoint *checkpoint,
                       const char *name,
                       void *target,
                       size_t target_bytes);

// Reads target_bytes bytes of a tensor, from offset_bytes on. As ol_read_into(); OL_EINVAL if the tensor has no such bytes.
ol_status ol_read_part(const ol_checkpoint *checkpoint,
                       const char *name,
                       uint64_t offset_bytes,
                       void *target,
                       size_t target_bytes);

// Reads a slice of a tensor: indices of its first dimensions, the outermost first; the others are taken whole. The slice is
// row-major itself. As ol_read_into(); OL_EINVAL if there is no such slice, or if target_bytes is not its length.
ol_status ol_read_slice(const ol_checkpoint *checkpoint,
                        const char *name,
                        const ol_indices *indices,
                        size_t dimensions,
                        void *target,
                        size_t target_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* ONELAYER_H */
