//! Detects that a client has left before its request is answered.
//!
//! A FIN says only that the client sends no more. The client may have closed its sending side alone (`shutdown(SHUT_WR)`) and
//! wait for the answer, or it may have left. The kernel cannot tell the difference until the router sends something. Then the
//! host of a client that has left answers with RST, within one round trip.
//!
//! ```text
//!   FIN before the answer begins, HTTP/1.1 --> send "100 Continue", which each client skips --RST--> it has left
//!                                                                                            `-----> answer it
//!   FIN after that, or HTTP/1.0            --> it has left
//! ```

use std::{
    fmt,
    future::Future,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use tokio::{
    io::{Interest, ReadBuf},
    net::TcpStream,
};

/// RFC 9110, 15.2: a client reads any number of interim answers, even unrequested ones, and waits for the final one.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Watches the connection of a client that waits for its answer.
pub(super) struct Departure {
    stream: Rc<TcpStream>,
    /// Completes when the connection is reset. Set once the interim answer was sent.
    reset: Option<Pin<Box<dyn Future<Output = ()>>>>,
}

impl Departure {
    pub(super) fn new(stream: &Rc<TcpStream>) -> Self {
        Self { stream: Rc::clone(stream), reset: None }
    }

    /// Ready once the client has left. `may_probe`: an interim answer may be sent now, because no byte of an answer has been.
    pub(super) fn poll(&mut self, context: &mut Context<'_>, may_probe: bool) -> Poll<()> {
        if self.reset.is_none() {
            let mut byte = [0];
            match self.stream.poll_peek(context, &mut ReadBuf::new(&mut byte)) {
                Poll::Pending => return Poll::Pending,
                // A further request waits behind this one, and hides a FIN behind it.
                Poll::Ready(Ok(1..)) => return Poll::Pending,
                Poll::Ready(Ok(0)) if may_probe && self.probe() => {}
                Poll::Ready(_) => return Poll::Ready(()),
            }
        }
        self.reset.as_mut().map_or(Poll::Pending, |reset| reset.as_mut().poll(context))
    }

    /// Sends an interim answer; the host of a client that has left answers with RST. Returns false if not all of it was sent.
    fn probe(&mut self) -> bool {
        let stream = Rc::clone(&self.stream);
        self.reset = Some(Box::pin(async move {
            let _ = stream.ready(Interest::ERROR).await;
        }));
        self.stream.try_write(INTERIM).is_ok_and(|sent| sent == INTERIM.len())
    }
}

impl fmt::Debug for Departure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Departure").field("has_probed", &self.reset.is_some()).finish_non_exhaustive()
    }
}
