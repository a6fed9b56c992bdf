//! `loadcheck synth`: a checkpoint of random bytes with a real model's names and shapes.

use onelayer_system::units::to_u64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::args::{Next, SynthArgs};
use crate::output::Output;
use crate::output::terminal::Terminal;
use crate::problem::{Code, Problem};
use crate::progress::Progress;
use crate::report::{CommandName, Synth};
use crate::signals::Interrupts;
use crate::sizes::SizeContext;
use onelayer_synth::{SynthError, SynthReport, SynthRequest};

use super::{Outcome, new_report};

/// Makes a checkpoint.
pub(crate) fn run(args: &SynthArgs, output: &Output, terminal: &Terminal) -> Outcome {
    let mut report = new_report(CommandName::Synth);
    let mut problems = output.check();
    let request = request(args).map_err(|problem| problems.push(problem)).ok();
    let (Some(request), true) = (request, problems.is_empty()) else {
        return Outcome::refused(report, problems);
    };
    let Ok(interrupts) = Interrupts::listen().map_err(|problem| problems.push(problem)) else {
        return Outcome::refused(report, problems);
    };
    let (made, signal) = make(&request, &interrupts, terminal);
    match made {
        Ok(made) => {
            report.synth = Some(Synth {
                model: args.model.to_string_lossy().into_owned(),
                target: made.directory.display().to_string(),
                bytes: made.tensor_bytes,
                files: to_u64(made.files.iter().filter(|(name, _)| name.ends_with(".safetensors")).count()),
                tensors: made.tensor_count,
                dtype: made.dtype.short_name().to_owned(),
                seed: made.seed,
                seconds: made.elapsed.as_secs_f64(),
            });
            let places = vec![args.target.to_string_lossy().into_owned()];
            let next = Next { command: "run", places, ..Next::default() };
            Outcome { next: Some(next), ..Outcome::of(report) }
        }
        Err(error) => match signal.filter(|_| error.is_interrupted()) {
            Some(signal) => Outcome::interrupted(report, Vec::new(), signal),
            None => Outcome::refused(report, vec![translate(&error)]),
        },
    }
}

fn request(args: &SynthArgs) -> Result<SynthRequest, Problem> {
    let model =
        args.model.to_str().ok_or_else(|| Problem::new(Code::Usage, "the preset or path is not UTF-8"))?;
    let mut request = SynthRequest::new(model, &args.target);
    request.dtype = args.dtype;
    request.layer_count = args.layers;
    request.force = args.output.force;
    request.seed = args.seed;
    request.thread_count = args.threads.map(std::num::NonZeroUsize::get);
    if let Some(shard_size) = args.max_shard_size {
        request.shard_bytes_max = SizeContext::default().resolve("--max-shard-size", shard_size)?;
    }
    Ok(request)
}

/// Makes it; a signal on the way cancels.
fn make(
    request: &SynthRequest,
    interrupts: &Interrupts,
    terminal: &Terminal,
) -> (Result<SynthReport, SynthError>, Option<i32>) {
    let cancel = Arc::clone(&request.cancel);
    let over = AtomicBool::new(false);
    let mut progress = Progress::start(terminal.progress, "");
    thread::scope(|scope| {
        let listener = thread::Builder::new().name("listener".to_owned()).spawn_scoped(scope, || {
            while !over.load(Ordering::Relaxed) {
                if let Ok(signal) = interrupts.receiver().recv_timeout(std::time::Duration::from_millis(20)) {
                    cancel.store(true, Ordering::Relaxed);
                    return Some(signal);
                }
            }
            None
        });
        let listener = match listener {
            Ok(listener) => listener,
            Err(source) => return (Err(SynthError::Thread { source }), None),
        };
        let made = onelayer_synth::run(request, &mut |done_bytes, total_bytes| {
            progress.update(done_bytes, total_bytes, "")
        });
        over.store(true, Ordering::Relaxed);
        drop(progress);
        (made, listener.join().unwrap_or_default())
    })
}

/// The error, sorted by what to do about it.
fn translate(error: &SynthError) -> Problem {
    // The same codes as those of `convert`.
    let code = if matches!(error, SynthError::NoSpace { .. }) {
        Code::NoSpace
    } else if matches!(
        error,
        SynthError::NotADirectory { .. } | SynthError::NotEmpty { .. } | SynthError::ForeignCheckpoint { .. }
    ) {
        Code::TargetRefused
    } else if matches!(error, SynthError::Io { .. } | SynthError::Full { .. } | SynthError::Appeared { .. }) {
        Code::WriteFailed
    } else if error.is_request() {
        Code::CannotBeMet
    } else if error.is_invalid_config() {
        Code::SourceInvalid
    } else {
        Code::CannotWrite
    };
    Problem::new(code, error.to_string())
}
