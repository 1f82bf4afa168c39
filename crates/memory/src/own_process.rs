//! [`OwnProcess`]: notices that this process was forked from the one that made something.
//!
//! A forked child has its parent's memory, but none of its threads. It shares the parent's sockets and memory maps, so
//! using them in the child would affect the parent.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// The number of forks between this process and the ancestor that first called [`OwnProcess::this`].
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The process that made something. The check makes no system call and takes no lock, because a thread that the child
/// does not have may have held the lock.
///
/// A child that was made by a bare system call, not by the C library's `fork`, is taken for its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnProcess(u64);

/// A value was used in a process that was forked from the value's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "this belongs to the process that this one was forked from, which still uses it: make a new one here, after the fork"
)]
pub struct Forked;

impl OwnProcess {
    /// The identity of the calling process.
    pub fn this() -> OwnProcess {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler adds to an atomic, which a child may do whatever its parent's threads were doing.
            let result = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
            assert_eq!(result, 0, "no memory to register a function of 8 bytes");
        });
        OwnProcess(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is the calling process.
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Fails in any process but this one.
    pub fn check(self) -> Result<(), Forked> {
        if self.is_this() { Ok(()) } else { Err(Forked) }
    }
}

unsafe extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That a child is told apart is tested with real forks in tests/fabric/test_fork.py: the threads of this test's
    /// program make it unfit for one.
    #[test]
    fn a_process_is_itself_until_it_forks() {
        let before = OwnProcess::this();
        assert!(before.is_this());
        assert_eq!(before.check(), Ok(()));
        // Stands for a forked child, whose handler has counted the fork.
        let in_a_child = OwnProcess(FORKS.load(Ordering::Relaxed) + 1);
        assert_eq!(in_a_child.check(), Err(Forked));
    }
}
