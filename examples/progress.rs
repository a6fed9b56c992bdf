//! Watches a load from another thread, and on request cancels it half way.
//!
//! `cargo run --release -p onelayer --example progress -- PATH [cancel]`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use onelayer::{Checkpoint, LayerStream, LoadError, Loader, Progress, Target};

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let path = words.first().ok_or("say which checkpoint")?;
    let cancels = words.get(1).is_some_and(|word| word == "cancel");

    let loader = Loader::builder(Target::Host).build()?;
    let mut stream = loader.stream(&Checkpoint::open(path)?)?;
    // Both are cheap to clone and work from any thread.
    let (progress, cancel) = (stream.progress(), stream.cancel_handle());
    let has_ended = AtomicBool::new(false);

    thread::scope(|scope| {
        scope.spawn(|| watch(&progress, &has_ended));
        let outcome = consume(&mut stream, |layers| {
            if cancels && layers == 2 {
                cancel.cancel();
            }
        });
        has_ended.store(true, Ordering::Release);
        outcome
    })?;
    println!("{} layers in {:.2?}", stream.report().layers, stream.report().elapsed);
    Ok(())
}

/// Takes every layer. A cancelled load is not a failure.
fn consume(stream: &mut LayerStream, mut after: impl FnMut(usize)) -> Result<(), LoadError> {
    for (layers, layer) in (1..).zip(stream) {
        match layer {
            Ok(layer) => drop(layer), // an engine would use it here
            Err(LoadError::Cancelled) => {
                println!("cancelled");
                break;
            }
            Err(error) => return Err(error),
        }
        after(layers);
    }
    Ok(())
}

fn watch(progress: &Progress, has_ended: &AtomicBool) {
    loop {
        // The load has ended: the numbers are final.
        let is_last = has_ended.load(Ordering::Acquire);
        let (done, total) = (progress.tensor_bytes_done(), progress.tensor_bytes_total());
        println!("{done} of {total} bytes, {} layers complete", progress.layers_done());
        if is_last {
            return;
        }
        thread::sleep(Duration::from_millis(20));
    }
}
