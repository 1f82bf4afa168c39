//! Sends the balancer's records to an operator's own program: each is a POST of JSON.

use std::{
    fmt, io,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, StatusCode, Uri,
    client::conn::http1,
    header::{CONTENT_TYPE, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use kvlane_door::{RuntimeThread, Stopped};
use serde_json::Value;
use thiserror::Error;
use tokio::{
    net::TcpStream,
    sync::mpsc::{Receiver, Sender, channel, error::TrySendError},
    time::timeout,
};

/// Most records that wait to be sent. [`Webhook::send`] drops further ones.
const WAITING_MAX: usize = 64;
/// Time for one POST, with its connection.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where records are POSTed. Its path and query may be secret: no log shows them.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookUrl(Uri);

impl WebhookUrl {
    /// The host, which logs may show.
    fn host(&self) -> &str {
        self.0.host().unwrap_or_default()
    }
}

impl fmt::Debug for WebhookUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WebhookUrl").field(&self.host()).finish()
    }
}

/// A text is not the address of a webhook.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0} is no address of a webhook: write it as http://HOST:PORT/PATH")]
pub struct WebhookUrlError(String);

impl FromStr for WebhookUrl {
    type Err = WebhookUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let url = text.parse::<Uri>().map_err(|_| WebhookUrlError(text.into()))?;
        let has_host = url.host().is_some_and(|host| !host.is_empty());
        let has_user = url.authority().is_some_and(|authority| authority.as_str().contains('@'));
        let port = url.authority().and_then(|authority| authority.as_str().rsplit_once(':'));
        let has_port = url.port_u16().is_some() || port.is_none_or(|(_, rest)| rest.ends_with(']'));
        let is_good = url.scheme_str() == Some("http") && has_host && has_port && !has_user;
        is_good.then_some(Self(url)).ok_or_else(|| WebhookUrlError(text.into()))
    }
}

/// Queue and thread for records. Sending never waits, so a slow or dead program misses some records.
#[derive(Debug)]
pub struct Webhook {
    records: Sender<Value>,
    /// Records were dropped since the last one that was queued.
    is_dropping: AtomicBool,
    thread: RuntimeThread,
}

/// Why a POST failed.
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
    /// Starts the thread that POSTs to `url`.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start(url: WebhookUrl) -> io::Result<Self> {
        let (records, waiting) = channel(WAITING_MAX);
        let post = |stopped| post_all(url, waiting, stopped);
        let thread = RuntimeThread::start_graceful("kvlane-webhook", post)?;
        Ok(Self { records, is_dropping: AtomicBool::new(false), thread })
    }

    /// Queues a record, or drops it if 64 records wait.
    pub fn send(&self, record: Value) {
        let is_full = matches!(self.records.try_send(record), Err(TrySendError::Full(_)));
        if is_full && !self.is_dropping.swap(is_full, Ordering::Relaxed) {
            // Log: the webhook of `[balance]` takes longer than records come; some are lost to it. Do: make it
            // answer sooner.
            tracing::warn!(
                once = true,
                "webhook too slow: dropping records until it takes one. /decisions has them"
            );
        }
        if !is_full {
            self.is_dropping.store(false, Ordering::Relaxed);
        }
    }

    /// Stops the thread after the POST in flight, within two seconds. Drops records that wait.
    pub fn stop(self) {
        self.thread.stop();
    }
}

async fn post_all(url: WebhookUrl, mut waiting: Receiver<Value>, mut stopped: Stopped) {
    let mut fails = false;
    loop {
        let record = tokio::select! {
            biased;
            () = stopped.wait() => return,
            record = waiting.recv() => record,
        };
        let Some(record) = record else { return };
        // A stop waits for this POST.
        let posted = timeout(PATIENCE, post(&url, record.to_string())).await;
        match posted.unwrap_or(Err(WebhookError::Late)) {
            Ok(()) if fails => {
                fails = false;
                // Log: the webhook of `[balance]` takes records again; those between are lost to it.
                tracing::info!(webhook = url.host(), "webhook answers again");
            }
            Ok(()) => {}
            Err(error) if !fails => {
                fails = true;
                // Log: the webhook of `[balance]` did not take a record; the router sends the next ones. Do: look
                // at the program behind the URL.
                tracing::warn!(once = true, webhook = url.host(), %error, "webhook failed to take a record; no further line until it takes one");
            }
            Err(_) => {}
        }
    }
}

async fn post(WebhookUrl(url): &WebhookUrl, record: String) -> Result<(), WebhookError> {
    let host = url.host().unwrap_or_default();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let stream = TcpStream::connect((bare, url.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let mut request = Request::new(Full::new(Bytes::from(record)));
    *request.method_mut() = Method::POST;
    if let Some(path) = url.path_and_query() {
        *request.uri_mut() = Uri::from(path.clone());
    }
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(host) = url.authority().and_then(|authority| HeaderValue::from_str(authority.as_str()).ok()) {
        request.headers_mut().insert(HOST, host);
    }
    let response = sender.send_request(request).await?;
    let status = response.status();
    connection.abort();
    if status.is_success() { Ok(()) } else { Err(WebhookError::Status(status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_keeps_its_path_and_query() {
        let url: WebhookUrl = "http://h:9/hooks/v1/?token=a".parse().unwrap();
        assert_eq!(url.0.path_and_query().unwrap().as_str(), "/hooks/v1/?token=a");
        assert_eq!(format!("{url:?}"), "WebhookUrl(\"h\")", "what may be a secret is not shown");
        assert!("http://[::1]/a".parse::<WebhookUrl>().is_ok() && "http://h".parse::<WebhookUrl>().is_ok());
        for wrong in ["https://h/a", "ftp://a", "h:9", "", "http:///a", "http://user@h/a", "http://h:99999/a"]
        {
            let told = wrong.parse::<WebhookUrl>().unwrap_err().to_string();
            assert!(told.contains("write it as http://HOST:PORT/PATH"), "{told}");
        }
    }
}
