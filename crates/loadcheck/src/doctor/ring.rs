//! io_uring: a ring is set up and a buffer is registered with it, by plain system calls. Nothing is
//! read.
//!
//! Numbers and structures: `include/uapi/linux/io_uring.h` of the kernel; `io_uring_setup(2)`,
//! `io_uring_register(2)`.
#![allow(unsafe_code, reason = "two system calls that no crate here wraps; each block says why it may")]

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use onelayer::units::HumanBytes;

use crate::report::Check;

/// Entries of the ring.
const ENTRIES: libc::c_uint = 8;
/// `IORING_REGISTER_BUFFERS`
const REGISTER_BUFFERS: libc::c_uint = 0;
/// Size of the registered buffer: small, since it is locked in memory.
const BUFFER_BYTES: usize = 1 << 20;
/// `struct io_uring_params`: 120 bytes, all of them numbers of 4 or 8 bytes.
const PARAMS_WORDS: usize = 30;

/// Sets up a ring.
pub(super) fn io_uring() -> Check {
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ring = set_up();
    let registered = ring.as_ref().ok().map(register);
    judge(&ring.map(drop), registered.as_ref(), &disabled, is_filtered(&status))
}

fn set_up() -> io::Result<OwnedFd> {
    let mut params = [0_u32; PARAMS_WORDS];
    // SAFETY: the second argument points to 120 writable bytes, aligned to 8 or less as the kernel
    // copies them by bytes; all zeros ask for nothing special. The kernel keeps no pointer to it.
    let result = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, params.as_mut_ptr()) };
    let descriptor = i32::try_from(result).ok().filter(|descriptor| *descriptor >= 0);
    let Some(descriptor) = descriptor else { return Err(io::Error::last_os_error()) };
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn register(ring: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0_u8; BUFFER_BYTES];
    let vector = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let count: libc::c_uint = 1;
    // SAFETY: the vector names one buffer that lives until the end of this function. The kernel pins
    // its pages for as long as the ring is open, and nothing is ever submitted that would write
    // there; pages outlive the allocation.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            REGISTER_BUFFERS,
            std::ptr::from_ref(&vector),
            count,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `Seccomp: 2`: system calls are filtered.
fn is_filtered(status: &str) -> bool {
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    mode.is_some_and(|mode| mode.trim() == "2")
}

fn judge(
    set_up: &io::Result<()>,
    registered: Option<&io::Result<()>>,
    disabled: &str,
    is_filtered: bool,
) -> Check {
    const CONSEQUENCE: &str = "where `--io uring` or `auto` would queue reads, threads make them one by one, which is named in the report";
    let error = match (set_up, registered) {
        (Ok(()), Some(Err(error))) => {
            let found = format!(
                "a ring was set up; a buffer of {} cannot be registered: {error}",
                HumanBytes(1 << 20)
            );
            let consequence = "reads through a ring copy the addresses of their pages every time";
            return Check::limited("io_uring", found, consequence)
                .fix("ulimit -l unlimited; docker run --ulimit memlock=-1");
        }
        (Ok(()), _) => return Check::ok("io_uring", "a ring was set up, and a buffer registered"),
        (Err(error), _) => error,
    };
    let missing = |found: String, fix: &str| Check::missing("io_uring", found, CONSEQUENCE).fix(fix);
    match (error.raw_os_error(), disabled.trim()) {
        (Some(libc::EPERM), "2") => missing(
            "switched off: kernel.io_uring_disabled is 2".to_owned(),
            "sysctl -w kernel.io_uring_disabled=0 (as root)",
        ),
        (Some(libc::EPERM), "1") => missing(
            "for some only: kernel.io_uring_disabled is 1".to_owned(),
            "sysctl -w kernel.io_uring_group=$(id -g) (as root)",
        ),
        (Some(libc::EPERM | libc::EACCES | libc::ENOSYS), _) if is_filtered => missing(
            format!("refused by a seccomp filter: {error}"),
            "docker run --security-opt seccomp=PROFILE.json with the three io_uring calls allowed; seccomp=unconfined to try",
        ),
        (Some(libc::ENOSYS), _) => {
            missing("this kernel has none".to_owned(), "a kernel from 5.6 on, built with CONFIG_IO_URING")
        }
        (Some(libc::ENOMEM), _) => {
            missing(format!("no ring: {error}"), "ulimit -l unlimited; docker run --ulimit memlock=-1")
        }
        _ => Check::missing("io_uring", format!("no ring: {error}"), CONSEQUENCE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::State;

    fn refused(number: i32, disabled: &str, is_filtered: bool) -> Check {
        judge(&Err(io::Error::from_raw_os_error(number)), None, disabled, is_filtered)
    }

    #[test]
    fn every_refusal_has_its_own_way_out() {
        let fix = |check: Check| check.fix.unwrap_or_default();
        assert!(fix(refused(libc::EPERM, "2\n", false)).contains("io_uring_disabled=0"));
        assert!(fix(refused(libc::EPERM, "1\n", false)).contains("io_uring_group"));
        assert!(fix(refused(libc::EPERM, "0\n", true)).contains("seccomp"));
        assert!(fix(refused(libc::ENOSYS, "", true)).contains("seccomp"), "some runtimes deny it exists");
        assert!(fix(refused(libc::ENOSYS, "", false)).contains("kernel"));
        assert!(fix(refused(libc::ENOMEM, "0\n", false)).contains("memlock"));
        assert_eq!(refused(libc::EMFILE, "0\n", false).state, State::Missing);
    }

    #[test]
    fn a_ring_without_registered_buffers_is_limited() {
        let denied = Err(io::Error::from_raw_os_error(libc::ENOMEM));
        assert_eq!(judge(&Ok(()), Some(&denied), "0", false).state, State::Limited);
        assert_eq!(judge(&Ok(()), Some(&Ok(())), "0", false).state, State::Ok);
    }

    #[test]
    fn filters_are_seen() {
        assert!(is_filtered("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n"));
        assert!(!is_filtered("Seccomp:\t0\nSeccomp_filters:\t0\n") && !is_filtered(""));
    }
}
