//! A thread that runs one future on a runtime of its own, until another thread stops it.

use std::{future::Future, io, sync::mpsc, thread::JoinHandle};

use tokio::{
    runtime::{Builder, Handle, LocalOptions, LocalRuntime},
    sync::watch,
};

/// A running thread. Dropping this stops it as well, without waiting for its end.
#[derive(Debug)]
pub struct RuntimeThread {
    stop: watch::Sender<bool>,
    runtime: Handle,
    thread: JoinHandle<()>,
}

/// Completes when the thread is to end.
#[derive(Debug)]
pub struct Stopped(watch::Receiver<bool>);

impl Stopped {
    /// Waits until the thread is stopped.
    pub async fn wait(&mut self) {
        // An error means that the handle of the thread was dropped.
        let _ = self.0.wait_for(|is_stopped| *is_stopped).await;
    }
}

impl RuntimeThread {
    /// Runs `work` until it ends or the thread is stopped. A stop drops it at its next await, and all tasks that it spawned.
    ///
    /// # Errors
    /// The kernel gives no thread, or no descriptors for the runtime.
    pub fn start<F: Future<Output = ()>>(
        name: &str,
        work: impl FnOnce() -> F + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_graceful(name, |mut stopped| async move {
            tokio::select! {
                () = work() => {}
                () = stopped.wait() => {}
            }
        })
    }

    /// Runs `work` until it ends. It has to end soon after its [`Stopped`] completes.
    ///
    /// # Errors
    /// The kernel gives no thread, or no descriptors for the runtime.
    pub fn start_graceful<F: Future<Output = ()>>(
        name: &str,
        work: impl FnOnce(Stopped) -> F + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let (started, has_started) = mpsc::channel();
        let run = move || {
            let runtime = match runtime() {
                Ok(runtime) => runtime,
                Err(error) => return drop(started.send(Err(error))),
            };
            let _ = started.send(Ok(runtime.handle().clone()));
            runtime.block_on(async { work(Stopped(stopped)).await });
            // A DNS lookup may hang, so the end does not wait for blocking calls.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run)?;
        let runtime =
            has_started.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended at once")))?;
        Ok(Self { stop, runtime, thread })
    }

    /// The thread's runtime, for tasks that other threads spawn there.
    pub fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Stops the work, and waits for its end.
    pub fn stop(self) {
        let _ = self.stop.send(true);
        // A panic of the work is no error here: the thread has ended.
        let _ = self.thread.join();
    }
}

/// A runtime whose tasks stay in this thread. A `LocalSet` in another runtime would cost a system call for each wake-up.
fn runtime() -> io::Result<LocalRuntime> {
    Builder::new_current_thread().enable_all().build_local(LocalOptions::default())
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[test]
    fn a_stop_drops_the_work_and_its_tasks() {
        let (dropped, drops) = mpsc::channel::<()>();
        let thread = RuntimeThread::start("test", move || async move {
            let of_task = dropped.clone();
            tokio::task::spawn_local(async move {
                let _kept = of_task;
                pending::<()>().await;
            });
            let _kept = dropped;
            pending::<()>().await;
        });
        thread.unwrap().stop();
        assert_eq!(drops.try_recv(), Err(mpsc::TryRecvError::Disconnected), "both are gone");
    }

    #[test]
    fn graceful_work_ends_by_itself_and_tasks_come_from_other_threads() {
        let (ended, end) = mpsc::channel();
        let thread = RuntimeThread::start_graceful("test", move |mut stopped| async move {
            stopped.wait().await;
            stopped.wait().await;
            tokio::task::yield_now().await;
            ended.send("ended").unwrap();
        });
        let thread = thread.unwrap();
        let (sum, sums) = mpsc::channel();
        drop(thread.runtime().spawn(async move { sum.send(1 + 1).unwrap() }));
        assert_eq!(sums.recv(), Ok(2));
        thread.stop();
        assert_eq!(end.try_recv(), Ok("ended"));
    }

    #[test]
    fn dropping_the_handle_stops_the_thread() {
        let (kept, gone) = mpsc::channel::<()>();
        drop(RuntimeThread::start("test", move || async move {
            let _kept = kept;
            pending::<()>().await;
        }));
        assert_eq!(gone.recv(), Err(mpsc::RecvError));
    }
}
