//! Which process something belongs to. A forked child has its parent's memory, but none of its threads, and shares its
//! sockets and its memory maps: what a child did with them would be done to the parent.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

/// How often the line of processes that ends in this one has forked, as counted since the first [`OwnProcess::this`].
static FORKS: AtomicU64 = AtomicU64::new(0);

/// The process that made something. Asking whether it is this one takes no system call and no lock, since a lock may have
/// been held by a thread that the child does not have.
///
/// A child made by a bare system call, past the C library's `fork`, is taken for its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnProcess(u64);

/// Something was used in a process that was forked from its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "this belongs to the process that this one was forked from, which still uses it: make a new one here, after the fork"
)]
pub struct Forked;

impl OwnProcess {
    /// This process.
    pub fn this() -> OwnProcess {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(|| {
            // SAFETY: the handler adds to an atomic number, which a child may do whatever its parent's threads were doing.
            let result = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
            assert_eq!(result, 0, "no memory to register a function of 8 bytes");
        });
        OwnProcess(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is this process.
    pub fn is_this(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Fails in any other process than its own.
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
        // What a child does first.
        let in_a_child = OwnProcess(FORKS.load(Ordering::Relaxed) + 1);
        assert_eq!(in_a_child.check(), Err(Forked));
    }
}
