//! The grids of the IQ types: vectors of 8 (or 4) numbers, stored by their index.
//!
//! They are facts of the format. `make_grids.py` writes `grids.bin` from gguf-py; here they are
//! unpacked while the crate is compiled.

const PACKED: &[u8; 9216] = include_bytes!("grids.bin");

pub(super) static IQ2_XXS: [[u8; 8]; 256] = unpack_2(0, [8, 25, 43, 0]);
pub(super) static IQ2_XS: [[u8; 8]; 512] = unpack_2(512, [8, 25, 43, 0]);
pub(super) static IQ2_S: [[u8; 8]; 1024] = unpack_2(512 + 1024, [8, 25, 43, 0]);
pub(super) static IQ3_XXS: [[u8; 4]; 256] = unpack_4(512 + 1024 + 2048, [4, 12, 20, 28, 36, 44, 52, 62]);
pub(super) static IQ3_S: [[u8; 4]; 512] = unpack_4(512 + 1024 + 2048 + 512, [1, 3, 5, 7, 9, 11, 13, 15]);
/// One more than the number: 0, 1 or 2 for -1, 0 or 1.
pub(super) static IQ1: [[u8; 8]; 2048] = unpack_2(512 + 1024 + 2048 + 512 + 1024, [0, 1, 2, 0]);

/// Vectors of 8 numbers, in two bytes each.
const fn unpack_2<const LEN: usize>(start: usize, numbers: [u8; 4]) -> [[u8; 8]; LEN] {
    let mut grid = [[0; 8]; LEN];
    let mut at = 0;
    while at < LEN * 8 {
        let byte = PACKED[start + at / 4];
        let index = match at % 4 {
            0 => byte & 3,
            1 => byte >> 2 & 3,
            2 => byte >> 4 & 3,
            _ => byte >> 6,
        };
        grid[at / 8][at % 8] = match index {
            0 => numbers[0],
            1 => numbers[1],
            2 => numbers[2],
            _ => numbers[3],
        };
        at += 1;
    }
    grid
}

/// Vectors of 4 numbers, in two bytes each.
const fn unpack_4<const LEN: usize>(start: usize, numbers: [u8; 8]) -> [[u8; 4]; LEN] {
    let mut grid = [[0; 4]; LEN];
    let mut at = 0;
    while at < LEN * 4 {
        let byte = PACKED[start + at / 2];
        let index = if at.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
        grid[at / 4][at % 4] = match index {
            0 => numbers[0],
            1 => numbers[1],
            2 => numbers[2],
            3 => numbers[3],
            4 => numbers[4],
            5 => numbers[5],
            6 => numbers[6],
            _ => numbers[7],
        };
        at += 1;
    }
    grid
}
