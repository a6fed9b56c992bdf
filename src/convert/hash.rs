//! Hashes of files and tensors: BLAKE3, and SHA-256 too where it is asked for.
//!
//! Large pieces are hashed by the loader's threads for hashes. They hold no bytes: callers wait
//! until a piece is hashed.

use std::io::{self, Write};

use blake3::Hasher;
use sha2::{Digest as _, Sha256};

use crate::load::{PARALLEL_BYTES_MIN, hash_both, update_hash};
use crate::plan::Placement;
use crate::units::{to_u64, to_usize};

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
    /// Of no bytes.
    pub(super) fn new(with_sha256: bool) -> Self {
        Self { blake3: Hasher::new(), sha256: with_sha256.then(Sha256::new) }
    }

    /// Adds the next bytes. Several threads hash a long piece.
    pub(super) fn update(&mut self, piece: &[u8]) {
        update_hash(&mut self.blake3, piece);
        self.update_sha256(piece);
    }

    /// Adds the next bytes on this thread alone: where several files are hashed at a time.
    pub(super) fn update_alone(&mut self, piece: &[u8]) {
        self.blake3.update(piece);
        self.update_sha256(piece);
    }

    fn update_sha256(&mut self, piece: &[u8]) {
        if let Some(sha256) = &mut self.sha256 {
            sha256.update(piece);
        }
    }

    /// The hashes of all bytes so far. Starts again.
    pub(super) fn take(&mut self) -> Hashes {
        let blake3 = *self.blake3.finalize().as_bytes();
        self.blake3.reset();
        Hashes { blake3, sha256: self.sha256.as_mut().map(|sha256| sha256.finalize_reset().into()) }
    }
}

/// Hashes a file of tensors and each tensor in it, from bytes that come in file order.
#[derive(Debug)]
pub(super) struct FileDigest {
    file: Digest,
    tensor: Digest,
    /// Tensors that are complete.
    complete: usize,
    /// Bytes of the next tensor that were hashed.
    tensor_bytes: u64,
}

impl FileDigest {
    /// Of no bytes.
    pub(super) fn new(with_sha256: bool) -> Self {
        let digest = Digest::new(with_sha256);
        Self { file: digest.clone(), tensor: digest, complete: 0, tensor_bytes: 0 }
    }

    /// Adds bytes that belong to no tensor: those of the header.
    pub(super) fn update_header(&mut self, bytes: &[u8]) {
        self.file.update(bytes);
    }

    /// Adds bytes of tensors. `tensors` are all tensors of the file, in its order; `on_tensor` gets
    /// each that is complete.
    pub(super) fn update(
        &mut self,
        bytes: &[u8],
        tensors: &[Placement],
        on_tensor: &mut dyn FnMut(&Placement, Hashes),
    ) {
        let Self { file, tensor, complete, tensor_bytes } = self;
        let mut each = TensorDigest { digest: tensor, complete, bytes: tensor_bytes };
        if bytes.len() < PARALLEL_BYTES_MIN {
            file.update(bytes);
            each.update(bytes, tensors, on_tensor);
        } else {
            hash_both(|| file.update(bytes), || each.update(bytes, tensors, on_tensor));
        }
    }

    /// The hashes of the whole file. Tensors without bytes at its end are complete now.
    ///
    /// # Panics
    /// If bytes of a tensor are missing.
    pub(super) fn finish(
        mut self,
        tensors: &[Placement],
        on_tensor: &mut dyn FnMut(&Placement, Hashes),
    ) -> Hashes {
        self.update(&[], tensors, on_tensor);
        assert_eq!(self.complete, tensors.len(), "every tensor of a file ends in it");
        self.file.take()
    }
}

/// The part of a [`FileDigest`] that hashes tensors.
struct TensorDigest<'a> {
    digest: &'a mut Digest,
    complete: &'a mut usize,
    bytes: &'a mut u64,
}

impl TensorDigest<'_> {
    fn update(
        &mut self,
        mut bytes: &[u8],
        tensors: &[Placement],
        on_tensor: &mut dyn FnMut(&Placement, Hashes),
    ) {
        while let Some(tensor) = tensors.get(*self.complete) {
            let missing_bytes = tensor.len_bytes() - *self.bytes;
            let (piece, rest) = bytes.split_at(bytes.len().min(to_usize(missing_bytes)));
            self.digest.update(piece);
            bytes = rest;
            if to_u64(piece.len()) < missing_bytes {
                *self.bytes += to_u64(piece.len());
                break;
            }
            *self.complete += 1;
            *self.bytes = 0;
            on_tensor(tensor, self.digest.take());
        }
        assert!(bytes.is_empty(), "the tensors of a file have no gaps");
    }
}

/// Hashes and counts the bytes that pass through it.
#[derive(Debug)]
pub(super) struct HashingWriter<W> {
    pub(super) out: W,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
}

impl<W: Write> HashingWriter<W> {
    pub(super) fn new(out: W, with_sha256: bool) -> Self {
        Self { out, digest: Digest::new(with_sha256), bytes: 0 }
    }
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.digest.update(&bytes[..written]);
        self.bytes += to_u64(written);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// 64 lower-case hexadecimal digits.
pub(super) fn hex(hash: &[u8; 32]) -> String {
    blake3::Hash::from_bytes(*hash).to_hex().to_string()
}

/// The hash that [`hex`] wrote; `None` for any other text.
pub(super) fn from_hex(text: &str) -> Option<[u8; 32]> {
    let hash = blake3::Hash::from_hex(text).ok()?;
    (hash.to_hex().as_str() == text).then(|| *hash.as_bytes())
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
