//! BLAKE3 of bytes that come piece by piece, and SHA-256 beside it where that is asked for.

use std::fmt::Write as _;

use blake3::Hasher;
use sha2::{Digest as _, Sha256};

use crate::load::update_hash;

/// The hashes of one file or tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hashes {
    /// BLAKE3.
    pub(super) blake3: [u8; 32],
    /// SHA-256, if it was asked for.
    pub(super) sha256: Option<[u8; 32]>,
}

/// Hashes bytes in order.
#[derive(Clone, Debug)]
pub(super) struct Digest {
    blake3: Hasher,
    sha256: Option<Sha256>,
}

impl Digest {
    /// Of nothing yet.
    pub(super) fn new(with_sha256: bool) -> Self {
        Self { blake3: Hasher::new(), sha256: with_sha256.then(Sha256::new) }
    }

    /// Adds what comes next.
    pub(super) fn update(&mut self, piece: &[u8]) {
        update_hash(&mut self.blake3, piece);
        if let Some(sha256) = &mut self.sha256 {
            sha256.update(piece);
        }
    }

    /// The hashes of everything so far; what comes next is the start of something else.
    pub(super) fn take(&mut self) -> Hashes {
        let blake3 = *self.blake3.finalize().as_bytes();
        self.blake3.reset();
        Hashes { blake3, sha256: self.sha256.as_mut().map(|sha256| sha256.finalize_reset().into()) }
    }
}

/// 64 lower-case hexadecimal digits.
pub(super) fn hex(hash: &[u8; 32]) -> String {
    hash.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a text takes whatever is written
        text
    })
}

/// The hash that [`hex`] wrote; `None` for any other text.
pub(super) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::PARALLEL_BYTES_MIN;

    // The published results for an empty input.
    const EMPTY_BLAKE3: &str = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262";
    const EMPTY_SHA256: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn pieces_hash_as_the_whole_and_nothing_is_left_of_what_came_before() {
        let bytes: Vec<u8> = (0..PARALLEL_BYTES_MIN + 77).map(|at| u8::try_from(at % 251).unwrap()).collect();
        for cuts in [vec![], vec![1, 5000], vec![PARALLEL_BYTES_MIN + 1]] {
            let mut digest = Digest::new(true);
            digest.update(b"something else");
            digest.take();
            let mut start = 0;
            for end in cuts.into_iter().chain([bytes.len()]) {
                digest.update(&bytes[start..end]);
                start = end;
            }
            let hashes = digest.take();
            assert_eq!(hashes.blake3, *blake3::hash(&bytes).as_bytes());
            assert_eq!(hashes.sha256, Some(Sha256::digest(&bytes).into()));
            let empty = digest.take();
            assert_eq!(
                (hex(&empty.blake3), hex(&empty.sha256.unwrap())),
                (EMPTY_BLAKE3.into(), EMPTY_SHA256.into())
            );
        }
        assert_eq!(Digest::new(false).take().sha256, None);
    }

    #[test]
    fn only_what_was_written_is_read() {
        let hash = *blake3::hash(b"").as_bytes();
        assert_eq!(from_hex(&hex(&hash)), Some(hash));
        let upper = EMPTY_BLAKE3.to_uppercase();
        let odd = EMPTY_BLAKE3.replace('a', "g");
        for text in ["", &EMPTY_BLAKE3[1..], &format!("{EMPTY_BLAKE3}0"), &upper, &odd] {
            assert_eq!(from_hex(text), None, "{text:?}");
        }
    }
}
