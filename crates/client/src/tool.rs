//! A blocking connection for tools, tests and benchmarks: status, settling, dropping namespaces, reading the pool.

use std::{io, time::Duration};

use bytes::Bytes;
use kvlane_block::PoolOffset;
use kvlane_memory::{PoolView, random};
use kvlane_proto::{
    Address, WIRE_MAX, WIRE_MIN, WIRE_OF_RECORDINGS, v1, v1::reply::Body as Answer, v1::request::Body as Ask,
};
use thiserror::Error;

use crate::{
    boot::BootId,
    connection::{ConnectError, Connection, Lost},
    daemon_user::DaemonUser,
};

/// Least timeout of a read of a recording: the last one waits until the daemon has recorded all that is queued.
const RECORDING_TIMEOUT: Duration = Duration::from_secs(10);

/// The default name and version of a client, in its greeting.
pub const CLIENT_NAME: &str = concat!("kvlane ", env!("CARGO_PKG_VERSION"));

/// Why a tool's request failed.
#[derive(Debug, Error)]
pub enum ToolError {
    /// No daemon answers, or it refused the greeting.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The daemon refused the request: its sentence.
    #[error("{0}")]
    Refused(String),
    /// The daemon did not answer within the timeout.
    #[error("the daemon did not answer within {0:?}")]
    Timeout(Duration),
    /// The connection ended.
    #[error("the connection to the daemon ended: {0}")]
    Lost(String),
    /// The kernel gives no random bytes for this process's nonce.
    #[error("cannot draw a nonce: {0}")]
    Random(#[source] io::Error),
    /// The pool could not be mapped, or the range is not in it.
    #[error("{0}")]
    Pool(String),
}

impl From<Lost> for ToolError {
    fn from(lost: Lost) -> Self {
        Self::Lost(lost.to_string())
    }
}

/// A tool's connection to the daemon.
#[derive(Debug)]
pub struct Tool {
    connection: Connection,
    last_request: u64,
    timeout: Duration,
    boot: BootId,
    version: String,
    /// The negotiated version of the wire.
    wire: u32,
    pool: Option<PoolView>,
}

impl Tool {
    /// Connects to the daemon of this user or root, and greets.
    ///
    /// # Errors
    /// [`ToolError::Connect`] names the address and what to do.
    pub fn connect(address: &Address, timeout: Duration) -> Result<Self, ToolError> {
        Self::connect_to_user(address, DaemonUser::default(), timeout)
    }

    /// As [`connect`](Self::connect), and trusts that user's daemon too.
    ///
    /// # Errors
    /// As of [`connect`](Self::connect).
    pub fn connect_to_user(
        address: &Address,
        user: DaemonUser,
        timeout: Duration,
    ) -> Result<Self, ToolError> {
        let nonce: [u8; 16] = random().map_err(ToolError::Random)?;
        let mut connection = Connection::connect(address, user)?;
        let hello = v1::Hello {
            wire_min: WIRE_MIN,
            wire_max: WIRE_MAX,
            client: CLIENT_NAME.into(),
            role: v1::hello::Role::Tool.into(),
            engine_id: String::new(),
            process_nonce: Bytes::copy_from_slice(&nonce),
            live_leases: Vec::new(),
        };
        let hello = v1::Request { id: 1, body: Some(Ask::Hello(hello)) };
        let reply = connection.call(&hello, timeout)?.ok_or(ToolError::Timeout(timeout))?;
        let boot = reply.boot_id.as_ref().try_into().unwrap_or_default();
        match reply.body {
            Some(Answer::Welcome(welcome)) => Ok(Self {
                connection,
                last_request: hello.id,
                timeout,
                boot,
                version: welcome.version,
                wire: welcome.wire,
                pool: None,
            }),
            Some(Answer::Refused(refused)) => {
                Err(ConnectError::Turned { address: address.clone(), sentence: refused.sentence }.into())
            }
            other => Err(ToolError::Lost(format!("the greeting was answered with {other:?}"))),
        }
    }

    /// The run of the daemon.
    pub fn boot(&self) -> BootId {
        self.boot
    }

    /// The daemon's version.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The daemon's blocks, spaces, sessions and engines.
    ///
    /// # Errors
    /// As for all calls: refused, timed out or lost.
    pub fn status(&mut self) -> Result<v1::Status, ToolError> {
        match self.call(Ask::GetStatus(v1::GetStatus {}), self.timeout)? {
            Answer::Status(status) => Ok(*status),
            other => Err(unexpected(&other)),
        }
    }

    /// The requests that the daemon recorded since the read that gave `cursor`; 0 begins a recording. It ends 10 s after the
    /// last read. `is_last` also closes requests that have not ended.
    ///
    /// # Errors
    /// [`ToolError::Refused`] if the daemon is older than recordings.
    pub fn read_recording(&mut self, cursor: u64, is_last: bool) -> Result<v1::RecordedRequests, ToolError> {
        if self.wire < WIRE_OF_RECORDINGS {
            let sentence = format!(
                "this daemon (kvlane {}) records no requests: install this tool's version, {}, for the daemon",
                self.version,
                env!("CARGO_PKG_VERSION")
            );
            return Err(ToolError::Refused(sentence));
        }
        let read = v1::ReadRecording { cursor, max: u32::MAX, is_last };
        match self.call(Ask::ReadRecording(read), self.timeout.max(RECORDING_TIMEOUT))? {
            Answer::RecordedRequests(requests) => Ok(requests),
            other => Err(unexpected(&other)),
        }
    }

    /// Returns once everything committed before is sealed and visible.
    ///
    /// # Errors
    /// [`ToolError::Timeout`] if that takes longer than `timeout`.
    pub fn settle(&mut self, timeout: Duration) -> Result<(), ToolError> {
        let timeout_ms = timeout.as_millis().min(u128::from(u32::MAX)) as u32;
        match self.call(Ask::Settle(v1::Settle { timeout_ms }), timeout + self.timeout) {
            Ok(_) => Ok(()),
            Err(ToolError::Refused(_)) => Err(ToolError::Timeout(timeout)),
            Err(error) => Err(error),
        }
    }

    /// Drops all blocks of the namespaces.
    ///
    /// # Errors
    /// [`ToolError::Refused`] if a namespace does not exist, or if the daemon could not record the drop on its SSD: a restart
    /// would bring the blocks back.
    pub fn drop_namespaces(&mut self, namespaces: &[[u8; 16]]) -> Result<(), ToolError> {
        let namespaces = namespaces.iter().map(|n| Bytes::copy_from_slice(n)).collect();
        self.call(Ask::DropNamespaces(v1::DropNamespaces { namespaces }), self.timeout).map(drop)
    }

    /// Reads pool bytes as they are now, whichever blocks they belong to.
    ///
    /// # Errors
    /// [`ToolError::Pool`] if the range is not in the pool.
    pub fn read_pool(&mut self, offset: PoolOffset, length: u64) -> Result<Vec<u8>, ToolError> {
        let pool = self.pool(offset, length)?;
        let mut bytes = vec![0; length as usize];
        pool.read(offset, &mut bytes).map_err(|error| ToolError::Pool(error.to_string()))?;
        Ok(bytes)
    }

    /// Overwrites pool bytes: for controls that must fail and tests of the scrub.
    ///
    /// # Errors
    /// [`ToolError::Pool`] when the range is not in the pool.
    pub fn write_pool(&mut self, offset: PoolOffset, bytes: &[u8]) -> Result<(), ToolError> {
        let pool = self.pool(offset, bytes.len() as u64)?;
        pool.write(offset, bytes).map_err(|error| ToolError::Pool(error.to_string()))
    }

    fn pool(&mut self, offset: PoolOffset, length: u64) -> Result<&PoolView, ToolError> {
        if self.pool.is_none() {
            let Answer::PoolDescriptor(described) =
                self.call(Ask::MapPool(v1::MapPool { writable: true }), self.timeout)?
            else {
                return Err(ToolError::Pool("the daemon did not hand out its pool".into()));
            };
            let fd = self.connection.take_descriptor().ok_or_else(|| {
                ToolError::Pool("no descriptor came with the pool: use the Unix socket".into())
            })?;
            let view = PoolView::map(fd, described.bytes, true)
                .map_err(|error| ToolError::Pool(format!("the pool cannot be mapped: {error}")))?;
            self.pool = Some(view);
        }
        match &self.pool {
            Some(pool) if offset.end_inside(length, pool.bytes()).is_some() => Ok(pool),
            _ => Err(ToolError::Pool(format!("{length} bytes at {offset} are not inside the pool"))),
        }
    }

    /// Says goodbye. When this returns, the daemon does not count this tool any more, or has not answered for a second.
    pub fn close(self) {
        self.connection.say_goodbye(self.last_request + 1);
    }

    fn call(&mut self, body: Ask, timeout: Duration) -> Result<Answer, ToolError> {
        self.last_request += 1;
        let request = v1::Request { id: self.last_request, body: Some(body) };
        let reply = self.connection.call(&request, timeout)?.ok_or(ToolError::Timeout(timeout))?;
        match reply.body {
            Some(Answer::Refused(refused)) => Err(ToolError::Refused(refused.sentence)),
            Some(body) => Ok(body),
            None => Err(ToolError::Lost("an answer without a body".into())),
        }
    }
}

fn unexpected(answer: &Answer) -> ToolError {
    ToolError::Lost(format!("unexpected answer {answer:?}"))
}
