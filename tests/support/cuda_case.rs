//! What tests of CUDA loads share: a checkpoint that goes round the ring several times, and how a
//! scenario is run.
//!
//! A scenario is a test that is ignored: it does nothing by itself, and is run by others in a
//! process of its own that finds the simulated driver.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use onelayer::load::{LoadedLayer, LoadedTensor};
use onelayer::{Checkpoint, Loader, LoaderBuilder, Target};

use onelayer_testing::cuda_sim::{MODES, SimRun};
use onelayer_testing::{TestTensor, small_decoder, write_sharded};

/// Runs a scenario of a module under every mode of the driver and some seeds. Clean means: no
/// misuse, nothing left behind.
pub fn runs_clean(
    module: &str,
    scenario: &str,
    seeds: std::ops::Range<u64>,
    change: impl Fn(SimRun) -> SimRun,
) {
    for mode in MODES {
        for seed in seeds.clone() {
            let run = SimRun::again(module, scenario).set("MODE", mode).set("SEED", seed);
            let outcome = change(run).run();
            outcome.assert_success();
            outcome.report().assert_clean();
        }
    }
}

/// A checkpoint that takes several rounds of the smallest ring, and its tensors.
pub struct Case {
    _folder: tempfile::TempDir,
    pub checkpoint: Checkpoint,
    pub tensors: Vec<TestTensor>,
}

impl Case {
    pub fn new(layers: usize, unit: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shards = small_decoder(layers, unit);
        write_sharded(folder.path(), &shards);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        Self { _folder: folder, checkpoint, tensors: shards.concat() }
    }

    pub fn bytes(&self, name: &str) -> &[u8] {
        &self.tensors.iter().find(|tensor| tensor.name == name).unwrap().bytes
    }

    /// Reads a tensor back and compares it.
    pub fn check(&self, tensor: &LoadedTensor) {
        let mut found = vec![0; self.bytes(tensor.name()).len()];
        assert!(tensor.read(0, &mut found).unwrap());
        assert!(found == self.bytes(tensor.name()), "{} is wrong", tensor.name());
        if found.len() > 1000 {
            let mut part = [0; 333];
            assert!(tensor.read(501, &mut part).unwrap());
            assert_eq!(part[..], found[501..834]);
        }
    }

    pub fn check_layer(&self, layer: &LoadedLayer) {
        layer.tensors().for_each(|tensor| self.check(&tensor));
    }
}

/// A loader for a device that is a simulated one.
pub fn loader(ordinal: u32, change: impl FnOnce(LoaderBuilder) -> LoaderBuilder) -> Loader {
    let builder = Loader::builder(Target::Cuda(ordinal)).host_budget(6 << 20);
    let loader = change(builder).build().unwrap();
    let info = loader.device().info().unwrap();
    assert!(info.name.contains("simulated"), "{info:?}");
    loader
}

pub fn free_bytes(loader: &Loader) -> u64 {
    loader.device().memory().unwrap().unwrap().free_bytes
}
