//! Drops and counts cached pages of a file. For benches and examples.
#![allow(unsafe_code, reason = "calls mincore")]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::MmapOptions;

/// Writes back and drops a file's cached pages; dirty ones cannot be dropped.
///
/// # Errors
/// The error of the system.
pub(crate) fn drop_pages(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

/// Cached bytes of a file, from `mincore`.
///
/// # Errors
/// The error of the system.
pub(crate) fn cached_bytes(path: &Path) -> io::Result<usize> {
    let file = File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(0);
    }
    let map = MmapOptions::new().map_raw_read_only(&file)?;
    let page = rustix::param::page_size();
    let mut resident = vec![0u8; map.len().div_ceil(page)];
    // SAFETY: the mapping is alive and page-aligned, since it starts at offset 0; the vector has
    // one byte per page.
    let status = unsafe { libc::mincore(map.as_mut_ptr().cast(), map.len(), resident.as_mut_ptr()) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(resident.iter().filter(|state| **state & 1 == 1).count() * page)
}
