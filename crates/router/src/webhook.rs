//! Tells an operator's own program what the balancer did: each record as a POST of JSON.

use std::{
    io,
    sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Request, StatusCode,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use thiserror::Error;
use tokio::{net::TcpStream, time::timeout};

use crate::proxy::Address;

/// Records that wait to be told; of more, the newest are not told.
const WAITING_MAX: usize = 64;
/// For one POST.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where records go. Telling never waits: a slow or dead program misses some.
#[derive(Debug)]
pub struct Webhook {
    records: SyncSender<Value>,
    thread: JoinHandle<()>,
}

/// Why a record was not told.
#[derive(Debug, Error)]
enum WebhookError {
    #[error("no connection: {0}")]
    Connection(#[from] io::Error),
    #[error("no answer: {0}")]
    Http(#[from] hyper::Error),
    #[error("no answer within {} s", PATIENCE.as_secs())]
    Late,
    #[error("it answered {0}")]
    Status(StatusCode),
}

impl Webhook {
    /// POSTs to this address, whose path is whole.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(address: Address) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (records, waiting) = sync_channel(WAITING_MAX);
        let thread = std::thread::Builder::new()
            .name("kvlane-webhook".into())
            .spawn(move || tell_all(&runtime, &address, &waiting))?;
        Ok(Self { records, thread })
    }

    /// Tells a record soon, if the program keeps up.
    pub fn tell(&self, record: Value) {
        if let Err(TrySendError::Full(_)) = self.records.try_send(record) {
            tracing::debug!("the webhook does not keep up: a record is not told");
        }
    }

    /// Tells what waits, and ends.
    pub fn stop(self) {
        drop(self.records);
        let _ = self.thread.join();
    }
}

fn tell_all(runtime: &tokio::runtime::Runtime, address: &Address, waiting: &Receiver<Value>) {
    let mut fails = false;
    for record in waiting {
        let posted = runtime.block_on(async {
            timeout(PATIENCE, post(address, record.to_string())).await.unwrap_or(Err(WebhookError::Late))
        });
        match posted {
            Ok(()) if fails => {
                fails = false;
                tracing::info!(webhook = %address, "the webhook answers again");
            }
            Ok(()) => {}
            Err(error) if !fails => {
                fails = true;
                tracing::warn!(webhook = %address, %error, "the webhook was not told a record; said once until it is told one");
            }
            Err(_) => {}
        }
    }
}

async fn post(address: &Address, record: String) -> Result<(), WebhookError> {
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::post(if address.path.is_empty() { "/" } else { &address.path });
    if let Some(headers) = request.headers_mut() {
        headers.insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static("application/json"));
        if let Ok(host) = address.authority.parse() {
            headers.insert(HOST, host);
        }
    }
    let Ok(request) = request.body(Full::new(Bytes::from(record))) else { return Ok(()) };
    let response = sender.send_request(request).await?;
    let status = response.status();
    connection.abort();
    if status.is_success() { Ok(()) } else { Err(WebhookError::Status(status)) }
}
