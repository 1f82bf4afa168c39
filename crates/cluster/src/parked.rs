//! Waits for the fabric by sleeping, so that the engine's own thread does the engine's work.
//!
//! A thread that waits by [`kvlane_fabric::Handle::wait`] polls the engine itself. That is soonest if one thread waits. While
//! bytes stream, several of them take the engine's lock and the processors from each other.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

/// Sleeps until the future is ready.
pub(crate) fn wait<T>(mut future: impl Future<Output = T> + Unpin) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match Pin::new(&mut future).poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_thread_sleeps_until_it_is_woken_and_the_future_is_ready() {
        let (is_ready, polls) = (Arc::new(AtomicBool::new(false)), AtomicU32::new(0));
        let value = wait(poll_fn(|context| {
            if polls.fetch_add(1, Ordering::Relaxed) == 0 {
                // Wakes it once too early.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if is_ready.load(Ordering::Acquire) {
                return Poll::Ready(7);
            }
            let (is_ready, waker) = (Arc::clone(&is_ready), context.waker().clone());
            std::thread::spawn(move || {
                is_ready.store(true, Ordering::Release);
                waker.wake();
            });
            Poll::Pending
        }));
        assert_eq!(value, 7);
        assert!(polls.into_inner() >= 3, "once too early");
    }
}
