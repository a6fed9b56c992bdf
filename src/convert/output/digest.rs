//! The hashes of a manifest: BLAKE3, and SHA-256 on request.

use std::fmt::Write as _;

use sha2::Digest as _;

/// From here on bytes are worth splitting over several cores.
const PARALLEL_BYTES_MIN: usize = 256 << 10;

/// What bytes hash to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Digest {
    pub(in super::super) blake3: [u8; 32],
    pub(in super::super) sha256: Option<[u8; 32]>,
}

impl Digest {
    pub(in super::super) fn blake3_text(&self) -> String {
        hex(&self.blake3)
    }

    pub(in super::super) fn sha256_text(&self) -> Option<String> {
        self.sha256.as_ref().map(hex)
    }
}

/// Hashes bytes that come piece by piece.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Digests {
    blake3: blake3::Hasher,
    sha256: Option<sha2::Sha256>,
}

impl Digests {
    pub(in super::super) fn new(with_sha256: bool) -> Self {
        Self { blake3: blake3::Hasher::new(), sha256: with_sha256.then(sha2::Sha256::new) }
    }

    pub(in super::super) fn update(&mut self, bytes: &[u8]) {
        if bytes.len() >= PARALLEL_BYTES_MIN {
            self.blake3.update_rayon(bytes);
        } else {
            self.blake3.update(bytes);
        }
        if let Some(sha256) = &mut self.sha256 {
            sha256.update(bytes);
        }
    }

    /// The hashes of all bytes so far; begins anew.
    pub(in super::super) fn finish(&mut self) -> Digest {
        let blake3 = *self.blake3.finalize().as_bytes();
        self.blake3.reset();
        Digest { blake3, sha256: self.sha256.as_mut().map(|sha256| sha256.finalize_reset().into()) }
    }
}

/// Lower-case hexadecimal digits.
fn hex(bytes: &[u8; 32]) -> String {
    let mut text = String::with_capacity(64);
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}
