//! The router's side of its Unix socket.

use std::{os::unix::net::UnixListener as StdListener, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::{
    control::{Answer, CALL_BYTES_MAX, Call, is_trusted, read_call},
    event::{ConnectorAddress, Event, Spec},
    inner::Inner,
};
use crate::address::Address;

/// Connections at a time. More wait in the kernel's queue.
const CONNECTIONS: usize = 16;
/// A call has to come, and its answer to be taken, within this time.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers, for ever.
pub(super) async fn serve(listener: StdListener, inner: Arc<Inner>) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return Ok(()) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection at the router's socket");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match is_trusted(&stream) {
            Ok(true) => {}
            refused => {
                tracing::warn!(?refused, "a process of another user was turned away at the router's socket");
                continue;
            }
        }
        let inner = Arc::clone(&inner);
        tokio::spawn(async move {
            let served = timeout(PATIENCE, serve_one(stream, &inner)).await;
            if !matches!(served, Ok(Ok(()))) {
                tracing::debug!(?served, "a connection at the router's socket ended");
            }
            drop(place);
        });
    }
}

async fn serve_one(mut stream: UnixStream, inner: &Inner) -> std::io::Result<()> {
    let mut line = Vec::with_capacity(256);
    // One byte more tells a line that is too long from one that has just the length.
    let mut limited = (&mut stream).take(CALL_BYTES_MAX as u64 + 1);
    while !line.contains(&b'\n') && limited.read_buf(&mut line).await? > 0 {}
    let end = line.iter().position(|byte| *byte == b'\n').unwrap_or(line.len());
    let answer = match read_call(&line[..end]) {
        Ok(call) => carry_out(call, inner),
        Err(error) => Err(error.to_string()),
    };
    let answer = answer.unwrap_or_else(|sentence| Answer { error: Some(sentence), ..Answer::default() });
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    stream.shutdown().await
}

fn carry_out(call: Call, inner: &Inner) -> Result<Answer, String> {
    let parse = |text: &str| text.parse::<Address>().map_err(|error| error.to_string());
    let (address, event) = match call {
        Call::List => return Ok(Answer { nodes: inner.list(None), error: None }),
        Call::Drain { node } => {
            let address = parse(&node)?;
            (address.clone(), Event::Drained(address))
        }
        Call::Remove { node, now } => {
            let address = parse(&node)?;
            (address.clone(), Event::Removed { address, now })
        }
        Call::Add { url, role, group, connector, connector_address } => {
            let address = parse(&url)?;
            let spec = Spec {
                group: group.unwrap_or_default().into(),
                connector: connector.map(|name| name.parse()).transpose()?,
                connector_address: connector_address
                    .map(|connector_address| {
                        connector_address
                            .parse::<ConnectorAddress>()
                            .map_err(|error| format!("{connector_address}: {error}"))
                    })
                    .transpose()?
                    .map(|connector_address| connector_address.0),
                ..Spec::new(address.clone(), role.parse()?)
            };
            (address, Event::Added(spec))
        }
    };
    inner.tell(event).map_err(|refusal| refusal.to_string())?;
    Ok(Answer { nodes: inner.list(Some(&address)), error: None })
}
