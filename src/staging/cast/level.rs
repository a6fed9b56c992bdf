//! The instruction sets for which the loops of casts are compiled, and which of them this machine
//! has.
//!
//! The crate is compiled for the oldest processors of each architecture. Newer ones cast a block in
//! a fraction of the time, so each loop exists once per level. Architectures other than x86-64 have
//! one level, with what the compiler may use there anyway (on 64-bit Arm that includes vectors).

#![allow(
    unsafe_code,
    reason = "calls functions compiled for more than the baseline; each block says why it may"
)]

use std::fmt;

/// A loop that is compiled once per level. Implementations mark `run` with `#[inline(always)]`, so
/// that it is compiled for the level's instructions.
pub(super) trait Work {
    type Output;

    fn run(self) -> Self::Output;
}

/// An instruction set. Constructed only on machines that have it: a value is the proof that code
/// for it may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// The baseline of the architecture.
    Baseline,
    /// Vectors of 256 bits.
    #[cfg(target_arch = "x86_64")]
    Avx2(HasAvx2),
    /// Vectors of 512 bits, also of bytes and words.
    #[cfg(target_arch = "x86_64")]
    Avx512(HasAvx512),
}

/// Proof that this machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HasAvx2(());

/// Proof that this machine has AVX-512 F, BW, DQ and VL.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HasAvx512(());

impl Level {
    /// The best level of this machine. Detected once.
    pub(crate) fn detected() -> Self {
        Self::avx512().or_else(Self::avx2).unwrap_or(Self::Baseline)
    }

    /// Runs a loop with this level's instructions.
    pub(super) fn run<W: Work>(self, work: W) -> W::Output {
        match self {
            Self::Baseline => baseline(work),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a value of this level exists only on machines that have its instructions.
            Self::Avx2(_) => unsafe { avx2(work) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512(_) => unsafe { avx512(work) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn avx2() -> Option<Self> {
        std::arch::is_x86_feature_detected!("avx2").then_some(Self::Avx2(HasAvx2(())))
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn avx512() -> Option<Self> {
        let has_all = std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512dq")
            && std::arch::is_x86_feature_detected!("avx512vl");
        has_all.then_some(Self::Avx512(HasAvx512(())))
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn avx2() -> Option<Self> {
        None
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn avx512() -> Option<Self> {
        None
    }
}

// Separate functions: inlined into a match over all types, the compiler's loops take a third
// longer.
#[inline(never)]
fn baseline<W: Work>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2")]
fn avx2<W: Work>(work: W) -> W::Output {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<W: Work>(work: W) -> W::Output {
    work.run()
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
        })
    }
}
