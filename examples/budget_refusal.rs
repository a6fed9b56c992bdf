//! Asks for a load that cannot work, reads from the refusal what would, and loads with exactly
//! that.
//!
//! `cargo run --release -p onelayer --example budget_refusal -- PATH`
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;

use onelayer::units::HumanBytes;
use onelayer::{Checkpoint, LoadError, Loader, PlanError, Target};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("say which checkpoint")?;
    let checkpoint = Checkpoint::open(path)?;
    let settings = Loader::builder(Target::Host);

    // Planning reads no tensor, so a refusal is cheap.
    let refusal = match settings.clone().host_budget(1 << 20).plan(&checkpoint) {
        Ok(plan) => return Err(format!("one MiB is enough:\n{plan}").into()),
        Err(error) => error,
    };
    println!("refused: {refusal}");
    assert!(refusal.is_over_budget(), "a larger budget would help");
    let LoadError::Plan(PlanError::BudgetTooSmall { smallest_bytes, .. }) = refusal else {
        return Err(refusal.into());
    };

    let loader = settings.host_budget(smallest_bytes).build()?;
    let plan = loader.plan(&checkpoint)?;
    for term in plan.memory().terms() {
        println!("{:>12}  {}", HumanBytes(term.bytes).to_string(), term.kind);
    }
    let loaded = loader.stream(&checkpoint)?.map(|layer| layer.map(|layer| layer.tensor_bytes()));
    let tensor_bytes: u64 = loaded.sum::<Result<u64, LoadError>>()?;
    println!("{} loaded within {}", HumanBytes(tensor_bytes), HumanBytes(smallest_bytes));
    Ok(())
}
