//! What users of the library rely on without calling it: types that move between threads, fit into
//! their errors and print in their debug output.

use std::error::Error;
use std::fmt::Debug;

use onelayer::live;
use onelayer::{
    Awaited, CancelHandle, Checkpoint, CheckpointError, CudaCode, Device, DeviceError, DeviceRegion, Holder,
    LayerId, LayerMap, LayerStream, Layers, LoadError, LoadOptions, LoadPlan, LoadReport, LoadedLayer,
    LoadedTensor, Loader, LoaderBuilder, Model, OpenOptions, PlanError, Progress, Receipt, SourceError,
    StagingError, Target, TensorHash, TensorReader,
};
use onelayer_probe::{Measured, ProbeError, Sampler, TreeSampler};

fn is_shared<T: Send + Sync + Debug + 'static>() {}
fn is_cloned<T: Clone>() {}
fn is_error<T: Error + Send + Sync + 'static>() {}

#[test]
fn types_may_cross_threads() {
    is_shared::<Checkpoint>();
    is_shared::<OpenOptions>();
    is_shared::<Layers>();
    is_shared::<LayerId>();
    is_shared::<LayerMap>();
    is_shared::<LoadPlan>();
    is_shared::<Target>();
    is_shared::<Device>();
    is_shared::<DeviceRegion>();
    is_shared::<CudaCode>();
    is_shared::<Loader>();
    is_shared::<LoadOptions>();
    is_shared::<LoaderBuilder>();
    is_shared::<LayerStream>();
    is_shared::<Awaited>();
    is_shared::<CancelHandle>();
    is_shared::<Progress>();
    is_shared::<LoadReport>();
    is_shared::<LoadedLayer>();
    is_shared::<LoadedTensor>();
    is_shared::<TensorHash>();
    is_shared::<TensorReader>();
    is_shared::<Model>();
    is_shared::<Holder>();
    is_shared::<Receipt>();
    is_shared::<live::Snapshot>();
    is_shared::<live::Allocation>();
    is_shared::<live::Difference>();
    is_shared::<Sampler>();
    is_shared::<TreeSampler>();
    is_shared::<Measured<u64>>();
}

#[test]
fn handles_are_cloned() {
    is_cloned::<Checkpoint>();
    is_cloned::<Device>();
    is_cloned::<Loader>();
    is_cloned::<LoaderBuilder>();
    is_cloned::<LoadPlan>();
    is_cloned::<LoadedTensor>();
    is_cloned::<CancelHandle>();
    is_cloned::<Progress>();
    is_cloned::<live::Snapshot>();
    is_cloned::<TensorReader>();
}

#[test]
fn errors_fit_into_a_boxed_error() {
    is_error::<CheckpointError>();
    is_error::<onelayer::layers::LayersError>();
    is_error::<PlanError>();
    is_error::<SourceError>();
    is_error::<onelayer::SliceError>();
    is_error::<StagingError>();
    is_error::<DeviceError>();
    is_error::<LoadError>();
    is_error::<onelayer::budget::BudgetError>();
    is_error::<ProbeError>();
}

/// Whoever prints an error with its causes prints each of them once.
#[test]
fn a_message_does_not_repeat_its_cause() {
    let cause = || std::io::Error::other("the cause");
    let errors: [Box<dyn Error>; 2] = [
        Box::new(SourceError::Open { path: "a".into(), source: cause() }),
        Box::new(LoadError::Thread { source: cause() }),
    ];
    for error in errors {
        assert!(!error.to_string().contains("the cause"), "{error}");
        assert!(error.source().is_some_and(|source| source.to_string() == "the cause"));
    }
}
