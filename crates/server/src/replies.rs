//! Sends the answers of a connection, from its session's thread and from those of its late lookups and saves.

use std::{
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use bytes::Bytes;
use kvlane_memory::send_with_fds;
use kvlane_proto::{
    MAX_FRAME_BYTES, Message, encode_frame,
    v1::{self, refused::Reason, reply::Body as Answer},
};
use parking_lot::Mutex;

use crate::{peer::Stream, refusal_log::Refusals};

/// Sends whole frames, one after the other, from any thread.
pub(crate) struct Replies {
    stream: Mutex<Stream>,
    boot: [u8; 16],
    refusals: Arc<Refusals>,
    /// The peer's name in the log.
    peer: String,
}

impl Replies {
    /// `boot` goes into every answer.
    pub(crate) fn new(stream: Stream, boot: [u8; 16], refusals: Arc<Refusals>, peer: String) -> Self {
        Self { stream: Mutex::new(stream), boot, refusals, peer }
    }

    /// Answers a request, with a descriptor if there is one. A failure ends the connection.
    pub(crate) fn send(&self, id: u64, body: Answer, descriptor: Option<OwnedFd>) -> io::Result<()> {
        let boot_id = Bytes::copy_from_slice(&self.boot);
        let mut reply = v1::Reply { id, boot_id, body: Some(body) };
        if reply.encoded_len() > MAX_FRAME_BYTES {
            let sentence =
                format!("the answer has {} bytes, more than a frame may have", reply.encoded_len());
            reply.body = Some(Answer::Refused(v1::Refused { reason: Reason::Limit.into(), sentence }));
        }
        if let Some(Answer::Refused(refused)) = &reply.body {
            self.refusals.note(&self.peer, refused);
        }
        let frame = encode_frame(&reply);
        let stream = self.stream.lock();
        let sent = match (&*stream, descriptor) {
            (Stream::Unix(stream), Some(fd)) => {
                // The descriptor travels with the first byte that the kernel takes.
                send_with_fds(stream, &frame, &[fd.as_fd()])
                    .and_then(|sent| (&mut &*stream).write_all(&frame[sent..]))
            }
            (Stream::Unix(stream), None) => (&mut &*stream).write_all(&frame),
            (Stream::Tcp(stream), _) => (&mut &*stream).write_all(&frame),
        };
        if sent.is_err() {
            // A part of the frame may have been sent. The peer would read the next frame as its rest.
            stream.shutdown();
        }
        sent
    }
}
