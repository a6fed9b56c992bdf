//! Exported tensors: types and shapes, ownership, freeing of memory, and refusals.
#![allow(unsafe_code, reason = "acts as a consumer in C; each block says why")]
#![allow(clippy::unwrap_used, clippy::as_conversions, reason = "a test that cannot go on panics")]

use std::path::PathBuf;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onelayer::{Checkpoint, DType, LoadError, Loader, Model, Rank, SplitRules, Target, Window};
use onelayer_dlpack::{
    DEVICE_CPU, DLDevice, DLManagedTensorVersioned, DLTensor, ExportError, FLAG_READ_ONLY, ManagedTensor,
    Memory, VERSION, data_type, export, export_for_stream, export_with,
};
use onelayer_testing::{TestTensor, random_bytes, small_decoder, write_file, write_sharded};

const HOST: DLDevice = DLDevice { device_type: DEVICE_CPU, device_id: 0 };

/// One file, loaded.
fn load(tensors: &[TestTensor]) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_file(&path, tensors, 0);
    Loader::builder(Target::Host).build().unwrap().load(&Checkpoint::open(path).unwrap()).unwrap()
}

fn tensor(dtype: &'static str, shape: &[u64], len: usize, seed: u64) -> TestTensor {
    TestTensor { name: dtype.to_owned(), dtype, shape: shape.to_vec(), bytes: random_bytes(len, seed) }
}

/// Deletes a tensor as a consumer does.
fn delete(raw: NonNull<DLManagedTensorVersioned>) {
    // SAFETY: alive: nothing else deletes it.
    let deleter = unsafe { raw.as_ref() }.deleter.unwrap();
    // SAFETY: called once, with its own tensor.
    unsafe { deleter(raw.as_ptr()) };
}

fn dimensions(tensor: &DLTensor, values: *const i64) -> Vec<i64> {
    // SAFETY: shape and strides have a value for each dimension; an empty box is not null either.
    unsafe { std::slice::from_raw_parts(values, usize::try_from(tensor.ndim).unwrap()) }.to_vec()
}

fn bytes(tensor: &DLTensor) -> &[u8] {
    let elements: i64 = dimensions(tensor, tensor.shape).iter().product();
    let bits = i64::from(tensor.dtype.bits) * i64::from(tensor.dtype.lanes);
    let len = usize::try_from((elements * bits + 7) / 8).unwrap();
    if len == 0 {
        return &[];
    }
    // SAFETY: an export has as many bytes as shape and type say, and nothing writes to them.
    unsafe { std::slice::from_raw_parts(tensor.data.cast::<u8>(), len) }
}

/// Counts how often it is dropped.
struct Owner(Arc<AtomicU64>, Box<[u8]>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn export_owned(drops: &Arc<AtomicU64>, shape: &[u64], flags: u64) -> ManagedTensor {
    let len = usize::try_from(shape.iter().product::<u64>()).unwrap();
    let mut owner = Owner(Arc::clone(drops), vec![7; len].into());
    let memory = Memory {
        name: "owned",
        data: owner.1.as_mut_ptr().cast(),
        dtype: DType::U8,
        shape,
        device: HOST,
        flags,
    };
    // SAFETY: the owner has a byte for each element, in a box that does not move, and nothing else
    // writes to them.
    unsafe { export_with(owner, &memory) }.unwrap()
}

#[test]
fn every_type_arrives_with_its_bytes() {
    for (seed, dtype) in (1..).zip(DType::ALL) {
        let bits = usize::try_from(dtype.bits().unwrap()).unwrap();
        let written = tensor(dtype.name(), &[2, 3, 4], 24 * bits / 8, seed);
        let model = load(std::slice::from_ref(&written));
        let exported = export(model.tensor(dtype.name()).unwrap()).unwrap();
        let seen = exported.tensor();
        assert_eq!(exported.managed().version, VERSION);
        assert_eq!((exported.managed().flags, seen.byte_offset, seen.device), (0, 0, HOST), "{dtype}");
        assert_eq!(Some(seen.dtype), data_type(dtype), "{dtype}");
        let (shape, strides) =
            if dtype == DType::F4 { ([2, 3, 2], [6, 2, 1]) } else { ([2, 3, 4], [12, 4, 1]) };
        assert_eq!(dimensions(seen, seen.shape), shape, "{dtype}");
        assert_eq!(dimensions(seen, seen.strides), strides, "{dtype}");
        assert_eq!(seen.data.addr() % 256, 0, "{dtype}");
        assert!(bytes(seen) == written.bytes, "{dtype}");
    }
}

#[test]
fn scalars_and_tensors_without_elements() {
    let scalar = TestTensor { name: "scalar".into(), ..tensor("F32", &[], 4, 1) };
    let empty = TestTensor { name: "empty".into(), ..tensor("F32", &[3, 0, 5], 0, 2) };
    let model = load(&[scalar.clone(), empty]);
    let exported = export(model.tensor("scalar").unwrap()).unwrap();
    assert_eq!(exported.tensor().ndim, 0);
    assert!(bytes(exported.tensor()) == scalar.bytes);
    let exported = export(model.tensor("empty").unwrap()).unwrap();
    let seen = exported.tensor();
    assert!(seen.data.is_null(), "there is nothing at it");
    assert_eq!(dimensions(seen, seen.shape), [3, 0, 5]);
    assert_eq!(dimensions(seen, seen.strides), [5, 5, 1]);
}

#[test]
fn a_tensor_outlives_all_it_came_from_and_dies_on_another_thread() {
    let written = small_decoder(3, 50_000);
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &written);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = Loader::builder(Target::Host).window(Window::All).build().unwrap();
    let mut stream = loader.stream(&checkpoint).unwrap();
    let mut exported = Vec::new();
    for layer in &mut stream {
        let layer = layer.unwrap();
        exported.extend(layer.tensors().map(|tensor| (tensor.name().to_owned(), export(tensor).unwrap())));
    }
    drop((stream, loader, checkpoint, folder));
    assert_eq!(exported.len(), written.iter().map(Vec::len).sum::<usize>());
    let consumer = std::thread::spawn(move || {
        for (name, exported) in exported {
            let written = written.iter().flatten().find(|tensor| tensor.name == name).unwrap();
            assert!(bytes(exported.tensor()) == written.bytes, "{name}");
            delete(exported.into_raw());
        }
    });
    consumer.join().unwrap();
}

#[test]
fn an_exported_tensor_keeps_its_place_in_the_window() {
    let folder = tempfile::tempdir().unwrap();
    write_sharded(folder.path(), &small_decoder(3, 1000));
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let loader = Loader::builder(Target::Host).window(Window::Layers(1));
    let loader = loader.stall_timeout(Duration::from_millis(300)).build().unwrap();
    let next_while_exported = |is_deleted: bool| {
        let mut stream = loader.stream(&checkpoint).unwrap();
        let first = stream.next().unwrap().unwrap().tensors().next().unwrap();
        let raw = export(first).unwrap().into_raw();
        if is_deleted {
            delete(raw);
            return stream.next().unwrap().map(drop);
        }
        let next = stream.next().unwrap().map(drop);
        delete(raw);
        next
    };
    assert!(matches!(next_while_exported(false), Err(LoadError::Stalled { .. })));
    next_while_exported(true).unwrap();
}

#[test]
fn a_consumer_may_write() {
    let model = load(&[TestTensor::random("a", 1000, 1), TestTensor::random("b", 1000, 2)]);
    let exported = export(model.tensor("a").unwrap()).unwrap();
    // SAFETY: the tensor has 1000 bytes, and nothing reads them meanwhile.
    unsafe { ptr::write_bytes(exported.tensor().data.cast::<u8>(), 9, 1000) };
    assert!(model.tensor("a").unwrap().as_bytes().unwrap() == [9; 1000]);
    assert!(model.tensor("b").unwrap().as_bytes().unwrap() == random_bytes(1000, 2));
}

#[test]
fn an_owner_goes_with_its_tensor_once() {
    let drops = Arc::new(AtomicU64::new(0));
    drop(export_owned(&drops, &[3, 5], 0));
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    let raw = export_owned(&drops, &[3, 5], FLAG_READ_ONLY).into_raw();
    // SAFETY: alive until it is deleted below.
    let managed = unsafe { raw.as_ref() };
    assert_eq!(managed.flags, FLAG_READ_ONLY);
    assert_eq!(bytes(&managed.dl_tensor), [7; 15]);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    delete(raw);
    assert_eq!(drops.load(Ordering::SeqCst), 2);
}

#[test]
fn an_older_consumer_gets_the_older_structure() {
    let drops = Arc::new(AtomicU64::new(0));
    let raw = export_owned(&drops, &[4], 0).into_unversioned().unwrap();
    // SAFETY: alive until it is deleted below.
    let managed = unsafe { raw.as_ref() };
    assert_eq!(bytes(&managed.dl_tensor), [7; 4]);
    let deleter = managed.deleter.unwrap();
    // SAFETY: called once, with the tensor it came with.
    unsafe { deleter(raw.as_ptr()) };
    assert_eq!(drops.load(Ordering::SeqCst), 1);
    let refused = export_owned(&drops, &[4], FLAG_READ_ONLY).into_unversioned();
    assert!(matches!(refused, Err(ExportError::ReadOnly)));
    assert_eq!(drops.load(Ordering::SeqCst), 2, "what is refused is not leaked");
}

#[test]
fn a_deleter_takes_null_and_owners_that_panic() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("an owner that cannot go");
        }
    }
    let memory =
        Memory { name: "n", data: ptr::null_mut(), dtype: DType::U8, shape: &[0], device: HOST, flags: 0 };
    // SAFETY: no elements, so no bytes.
    let exported = unsafe { export_with(Panics, &memory) }.unwrap();
    let deleter = exported.managed().deleter.unwrap();
    // SAFETY: null is allowed.
    unsafe { deleter(ptr::null_mut()) };
    delete(exported.into_raw());
}

#[test]
fn what_dlpack_cannot_describe_is_refused_by_name() {
    let model = load(&[TestTensor { name: "odd".into(), ..tensor("F4", &[2, 3], 3, 1) }]);
    let refused = export(model.tensor("odd").unwrap()).unwrap_err();
    assert!(matches!(refused, ExportError::HalfElement { .. }));
    assert!(refused.to_string().contains("\"odd\" of shape [2, 3]"), "{refused}");

    let memory = Memory {
        name: "strange",
        data: ptr::null_mut(),
        dtype: DType::Opaque,
        shape: &[0],
        device: HOST,
        flags: 0,
    };
    // SAFETY: no elements, so no bytes.
    let refused = unsafe { export_with((), &memory) }.unwrap_err();
    assert!(
        matches!(&refused, ExportError::UnknownElement { tensor, .. } if tensor == "strange"),
        "{refused}"
    );

    let checkpoint = Checkpoint::open(fixture("llama")).unwrap();
    let nowhere = Loader::builder(Target::None).build().unwrap();
    let layer = nowhere.stream(&checkpoint).unwrap().next().unwrap().unwrap();
    let refused = export(layer.tensors().next().unwrap()).unwrap_err();
    assert!(matches!(&refused, ExportError::Nowhere { target, .. } if target == "none"), "{refused}");
}

#[test]
fn a_part_of_a_tensor_has_the_shape_of_the_part() {
    let whole =
        TestTensor { name: "model.layers.0.mlp.down_proj.weight".into(), ..tensor("U8", &[3, 8], 24, 1) };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write_file(&path, std::slice::from_ref(&whole), 0);
    let second = Loader::builder(Target::Host).shard(Rank::new(1, 2).unwrap(), SplitRules::common());
    let model = second.build().unwrap().load(&Checkpoint::open(path).unwrap()).unwrap();
    let exported = export(model.tensor(&whole.name).unwrap()).unwrap();
    let seen = exported.tensor();
    assert_eq!(dimensions(seen, seen.shape), [3, 4]);
    assert_eq!(dimensions(seen, seen.strides), [4, 1]);
    let halves: Vec<u8> = whole.bytes.chunks(8).flat_map(|row| row[4..].to_vec()).collect();
    assert!(bytes(seen) == halves);
}

#[test]
fn on_the_host_no_stream_needs_to_wait() {
    let model = load(&[TestTensor::random("a", 100, 1)]);
    // SAFETY: the host has no streams and ignores the handle.
    let exported = unsafe { export_for_stream(model.tensor("a").unwrap(), 1) }.unwrap();
    assert!(bytes(exported.tensor()) == random_bytes(100, 1));
}

#[test]
fn ten_thousand_from_four_threads_leave_nothing_behind() {
    const CYCLES_PER_THREAD: u64 = 2500;
    let drops = Arc::new(AtomicU64::new(0));
    let mut model = load(&[TestTensor::random("a", 300_000, 1), TestTensor::random("b", 100, 2)]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for cycle in 0..CYCLES_PER_THREAD {
                    drop(export_owned(&drops, &[2, 3], 0));
                    let name = if cycle % 2 == 0 { "a" } else { "b" };
                    delete(export(model.tensor(name).unwrap()).unwrap().into_raw());
                }
            });
        }
    });
    assert_eq!(drops.load(Ordering::SeqCst), 4 * CYCLES_PER_THREAD);
    let receipt = model.unload_all();
    assert_eq!(receipt.returned_bytes, receipt.asked_bytes, "no tensor holds its layer");
}

/// A folder of the repository's fixtures.
fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/checkpoints").join(name)
}
