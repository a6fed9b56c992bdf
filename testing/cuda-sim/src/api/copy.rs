//! Copies and fills.

use crate::sim::{Class, call};

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(target: u64, source: usize, len: usize, stream: usize) -> u32 {
    call("cuMemcpyHtoDAsync_v2", Class::Work, |sim| {
        sim.current()?;
        sim.copy_to_device(target, source, len, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(target: usize, source: u64, len: usize, stream: usize) -> u32 {
    call("cuMemcpyDtoHAsync_v2", Class::Work, |sim| {
        sim.current()?;
        sim.copy_to_host(target, source, len, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, len: usize, stream: usize) -> u32 {
    call("cuMemcpyDtoDAsync_v2", Class::Work, |sim| {
        sim.current()?;
        sim.copy_on_device(target, source, len, stream)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(target: u64, value: u8, len: usize, stream: usize) -> u32 {
    call("cuMemsetD8Async", Class::Work, |sim| {
        sim.current()?;
        sim.fill(target, value, len, stream)
    })
}
