//! Watches a run under a limit: ends what is left of it when the kernel has killed a part, or when
//! it takes too long.
//!
//! A program of several processes may wait forever for the one that was killed, and a limit that is
//! just too small can make a load a thousand times slower by having it read the same pages again
//! and again.

use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{RecvTimeoutError, bounded};
use onelayer_probe::ChildGroup;

/// How often it looks.
const INTERVAL: Duration = Duration::from_millis(100);
/// How long what survives a kill may go on.
const PATIENCE: Duration = Duration::from_millis(500);

/// How a guarded run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guarded {
    /// Nothing: the run ended by itself.
    LeftAlone,
    /// The kernel had killed a part, and the rest went on.
    EndedRest,
    /// The run took too long.
    TooSlow,
}

/// Does `work`, which runs processes in `group`, on this thread.
pub(super) fn guarded<T>(
    group: &ChildGroup,
    give_up: Option<Duration>,
    work: impl FnOnce() -> T,
) -> (T, Guarded) {
    let (done, is_done) = bounded::<()>(0);
    thread::scope(|scope| {
        let guard = scope.spawn(move || {
            let start = Instant::now();
            let mut killed_at = None;
            while is_done.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if killed_at.is_none() && group.memory().oom_kill_count.value() > Some(0) {
                    killed_at = Some(Instant::now());
                }
                let found = match (killed_at, give_up) {
                    (Some(at), _) if at.elapsed() >= PATIENCE => Guarded::EndedRest,
                    (_, Some(give_up)) if start.elapsed() >= give_up => Guarded::TooSlow,
                    _ => continue,
                };
                // Should that fail, the run goes on to its own end.
                let _ = group.kill();
                return found;
            }
            Guarded::LeftAlone
        });
        let result = work();
        drop(done);
        (result, guard.join().unwrap_or(Guarded::LeftAlone))
    })
}
