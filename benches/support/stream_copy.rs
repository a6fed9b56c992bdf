//! Copies with non-temporal stores, for memory that is not read soon. Chosen at run time.
#![allow(unsafe_code, reason = "uses vector stores that are chosen at run time")]

/// How to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamCopy {
    /// `memcpy`.
    Plain,
    /// Stores of 32 bytes.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Stores of 64 bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl StreamCopy {
    /// The ways supported by this processor, without `memcpy`.
    pub(crate) fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let mut found = Vec::new();
            if std::arch::is_x86_feature_detected!("avx2") {
                found.push(Self::Avx2);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                found.push(Self::Avx512);
            }
            found
        }
        #[cfg(not(target_arch = "x86_64"))]
        Vec::new()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "mapped, memcpy",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "mapped, streaming AVX2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "mapped, streaming AVX-512",
        }
    }

    /// Copies `len` bytes.
    ///
    /// # Safety
    /// Both pointers are valid for `len` bytes that do not overlap, and the processor supports this
    /// way.
    pub(crate) unsafe fn copy(self, source: *const u8, target: *mut u8, len: usize) {
        let done = match self {
            Self::Plain => 0,
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promise.
            Self::Avx2 if target.addr().is_multiple_of(32) => unsafe { avx2(source, target, len) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Self::Avx512 if target.addr().is_multiple_of(64) => unsafe { avx512(source, target, len) },
            #[cfg(target_arch = "x86_64")]
            _ => 0,
        };
        let (source, target) = (source.wrapping_add(done), target.wrapping_add(done));
        // SAFETY: `done` is at most `len`, so the rest is within both.
        unsafe { std::ptr::copy_nonoverlapping(source, target, len - done) };
    }
}

/// Copies all whole pieces of 128 bytes and returns their total size.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn avx2(source: *const u8, target: *mut u8, len: usize) -> usize {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    let whole = len / 128 * 128;
    for offset in (0..whole).step_by(128) {
        let from = source.wrapping_add(offset).cast::<__m256i>();
        let to = target.wrapping_add(offset).cast::<__m256i>();
        let mut loaded = [std::mem::MaybeUninit::<__m256i>::uninit(); 4];
        for (index, piece) in loaded.iter_mut().enumerate() {
            // SAFETY: the piece is within the first `whole` bytes of the source.
            piece.write(unsafe { _mm256_loadu_si256(from.wrapping_add(index)) });
        }
        for (index, piece) in loaded.into_iter().enumerate() {
            // SAFETY: it was written above.
            let piece = unsafe { piece.assume_init() };
            // SAFETY: the piece is within the target, whose address is a multiple of 32.
            unsafe { _mm256_stream_si256(to.wrapping_add(index), piece) };
        }
    }
    _mm_sfence();
    whole
}

/// The same in assembly: the oldest supported compiler lacks the intrinsics.
#[cfg(target_arch = "x86_64")]
unsafe fn avx512(source: *const u8, target: *mut u8, len: usize) -> usize {
    let whole = len / 256 * 256;
    if whole == 0 {
        return 0;
    }
    // SAFETY: reads and writes the first `whole` bytes, 256 at a time; the target's address is a
    // multiple of 64; the registers are declared as clobbered.
    unsafe {
        std::arch::asm!(
            "2:",
            "vmovdqu64 zmm0, [{from}]",
            "vmovdqu64 zmm1, [{from} + 64]",
            "vmovdqu64 zmm2, [{from} + 128]",
            "vmovdqu64 zmm3, [{from} + 192]",
            "vmovntdq [{to}], zmm0",
            "vmovntdq [{to} + 64], zmm1",
            "vmovntdq [{to} + 128], zmm2",
            "vmovntdq [{to} + 192], zmm3",
            "add {from}, 256",
            "add {to}, 256",
            "cmp {from}, {end}",
            "jb 2b",
            "sfence",
            "vzeroupper",
            from = inout(reg) source => _,
            to = inout(reg) target => _,
            end = in(reg) source.wrapping_add(whole),
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack),
        );
    }
    whole
}
