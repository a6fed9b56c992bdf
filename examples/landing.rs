//! Compares plans with and without in-phase landing: copies, moves and arena bytes.
//!
//! `cargo run -p onelayer --example landing -- [PATH]... [INVENTORY]...`
//!
//! PATH is a checkpoint. INVENTORY is a name in fixtures/inventories; with `+fp8` its weights have
//! 8 bits and two scales each, as after static quantization. An inventory is laid out in one file
//! like the format's own writer does: wide types first, then by name. Without arguments: the sum
//! over fixtures/inventories.
#![allow(clippy::print_stdout, clippy::as_conversions, reason = "an example prints rounded numbers")]
#![allow(dead_code, reason = "it shares a reader with another example")]

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use onelayer::plan::{Landing, LoadPlan, PlanLimits, ResidentKind};
use onelayer::units::{HumanBytes, MIB};
use onelayer::{Checkpoint, DType, Layers};

#[path = "inventories/read.rs"]
mod read;

use read::Inventory;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let folders = read::read_tree(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/inventories").as_ref())?;
    let inventories = || folders.iter().flat_map(|folder| &folder.inventories);
    let scratch = tempfile::tempdir()?;
    println!(
        "| checkpoint | bytes | layers | tensors | reads | copies, exact | in phase | moves | moved | arenas larger by |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    if words.is_empty() {
        let mut sum = Figures::default();
        let mut count = 0;
        for inventory in inventories().filter(|inventory| !inventory.tensors.is_empty()) {
            if let Some(checkpoint) = lay_out(inventory, false, scratch.path())? {
                sum.add(&Figures::of(&checkpoint)?);
                count += 1;
            }
        }
        sum.print(&format!("{count} inventories"));
    }
    for word in &words {
        let (name, is_fp8) = word.strip_suffix("+fp8").map_or((word.as_str(), false), |name| (name, true));
        let inventory = inventories().find(|inventory| inventory.name == name);
        let checkpoint = match inventory {
            Some(inventory) => lay_out(inventory, is_fp8, scratch.path())?.ok_or("a shape is unknown")?,
            None => Checkpoint::open(name)?,
        };
        Figures::of(&checkpoint)?.print(word);
    }
    Ok(())
}

/// One sparse file with the tensors of an inventory; `None` if a shape is unknown.
fn lay_out(inventory: &Inventory, is_fp8: bool, folder: &Path) -> Result<Option<Checkpoint>, Box<dyn Error>> {
    let mut tensors: Vec<(DType, String, Vec<u64>)> = Vec::new();
    for (name, shape) in &inventory.tensors {
        let Some(shape) = shape else { return Ok(None) };
        let stem = name.strip_suffix(".weight").filter(|stem| is_fp8 && stem.ends_with("proj"));
        if let Some(stem) = stem {
            tensors.push((DType::F32, format!("{stem}.weight_scale"), vec![]));
            tensors.push((DType::F32, format!("{stem}.input_scale"), vec![]));
        }
        tensors.push((stem.map_or(DType::Bf16, |_| DType::F8E4M3), name.clone(), shape.clone()));
    }
    tensors.sort_by(|(dtype, name, _), (other, other_name, _)| {
        other.bits().cmp(&dtype.bits()).then_with(|| name.cmp(other_name))
    });
    let (mut header, mut end) = (String::from("{"), 0);
    for (dtype, name, shape) in &tensors {
        let bytes = shape.iter().product::<u64>() * dtype.bits().unwrap_or(8) / 8;
        let comma = if header.len() > 1 { "," } else { "" };
        let name = serde_json::to_string(name)?;
        header.push_str(&format!(
            r#"{comma}{name}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{end},{}]}}"#,
            end + bytes
        ));
        end += bytes;
    }
    header.push('}');
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let path = folder.join("model.safetensors");
    let mut file = File::create(&path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    file.set_len(8 + header.len() as u64 + end)?;
    Ok(Some(Checkpoint::open(path)?))
}

#[derive(Default)]
struct Figures {
    tensor_bytes: u64,
    layers: u64,
    tensors: u64,
    reads: u64,
    exact_copies: u64,
    copies: u64,
    moves: u64,
    moved_bytes: u64,
    exact_bytes: u64,
    used_bytes: u64,
}

impl Figures {
    fn of(checkpoint: &Checkpoint) -> Result<Self, Box<dyn Error>> {
        let layers = Layers::group(checkpoint)?;
        let plan = |landing| {
            let mut limits = PlanLimits::new(64 * MIB + checkpoint.metadata_bytes() + layers.peak_bytes());
            (limits.landing, limits.resident) = (landing, ResidentKind::Device);
            LoadPlan::build(checkpoint, &layers, &limits, |_| true)
        };
        let (exact, in_phase) = (plan(Landing::Exact)?, plan(Landing::InPhase)?);
        let copies = |plan: &LoadPlan| plan.reads().map(|read| plan.copies(&read).count() as u64).sum();
        let moves = || in_phase.layers().iter().flat_map(|layer| in_phase.moves(layer));
        Ok(Self {
            tensor_bytes: in_phase.tensor_bytes(),
            layers: in_phase.layers().len() as u64,
            tensors: checkpoint.tensor_count() as u64,
            reads: in_phase.reads().len() as u64,
            exact_copies: copies(&exact),
            copies: copies(&in_phase),
            moves: moves().count() as u64,
            moved_bytes: moves().map(|step| step.len_bytes).sum(),
            exact_bytes: used_bytes(&exact),
            used_bytes: used_bytes(&in_phase),
        })
    }

    fn add(&mut self, other: &Self) {
        self.tensor_bytes += other.tensor_bytes;
        self.layers += other.layers;
        self.tensors += other.tensors;
        self.reads += other.reads;
        self.exact_copies += other.exact_copies;
        self.copies += other.copies;
        self.moves += other.moves;
        self.moved_bytes += other.moved_bytes;
        self.exact_bytes += other.exact_bytes;
        self.used_bytes += other.used_bytes;
    }

    fn print(&self, name: &str) {
        println!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            HumanBytes(self.tensor_bytes),
            self.layers,
            self.tensors,
            self.reads,
            self.exact_copies,
            self.copies,
            self.moves,
            HumanBytes(self.moved_bytes),
            HumanBytes(self.used_bytes.saturating_sub(self.exact_bytes)),
        );
    }
}

/// Size of all arenas up to their last tensor, before rounding up to pages.
fn used_bytes(plan: &LoadPlan) -> u64 {
    let end = |layer| {
        let placed = plan
            .placements(layer)
            .iter()
            .map(|placement| placement.arena_offset_bytes + placement.len_bytes());
        let landed = plan.moves(layer).iter().map(|step| step.source_arena_offset_bytes + step.len_bytes);
        placed.chain(landed).max().unwrap_or(0)
    };
    plan.layers().iter().map(end).sum()
}
