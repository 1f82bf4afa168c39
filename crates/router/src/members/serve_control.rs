//! Serves operators' calls ([`Call`]) at the router's Unix socket.

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
    registry::Registry,
};
use crate::address::Address;

/// Connections at a time. More wait in the kernel's queue.
const CONNECTIONS: usize = 16;
/// Time for a call to come and for its answer to be sent.
const PATIENCE: Duration = Duration::from_secs(2);

/// Accepts connections for ever, from processes of this user and of root.
pub(super) async fn serve(listener: StdListener, registry: Arc<Registry>) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return Ok(()) };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Log: `kvlane route list` and its like wait, mostly for lack of file descriptors; the router
                // tries again. Do: raise the limit of open files.
                tracing::warn!(%error, "cannot accept a connection at the router's socket");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        match is_trusted(&stream) {
            Ok(true) => {}
            Ok(false) => {
                // Log: only the router's own user and root may use its socket; this caller was turned away. Do:
                // run `kvlane route list` and its like as the router's user.
                tracing::warn!("connection refused at the router's socket: the peer is another user");
                continue;
            }
            Err(error) => {
                // Log: the kernel did not name the caller's user, so the caller was turned away. Do: run the
                // command again.
                tracing::warn!(%error, "connection refused at the router's socket: the peer's user is unknown");
                continue;
            }
        }
        let registry = Arc::clone(&registry);
        tokio::spawn(async move {
            let served = timeout(PATIENCE, serve_one(stream, &registry)).await;
            if !matches!(served, Ok(Ok(()))) {
                tracing::debug!(?served, "connection at the router's socket ended without an answer");
            }
            drop(permit);
        });
    }
}

async fn serve_one(mut stream: UnixStream, registry: &Registry) -> std::io::Result<()> {
    let mut line = Vec::with_capacity(256);
    // One byte more than the longest line shows that a line is too long.
    let mut limited = (&mut stream).take(CALL_BYTES_MAX as u64 + 1);
    while !line.contains(&b'\n') && limited.read_buf(&mut line).await? > 0 {}
    let end = line.iter().position(|byte| *byte == b'\n').unwrap_or(line.len());
    let answer = match read_call(&line[..end]) {
        Ok(call) => carry_out(call, registry),
        Err(error) => Err(error.to_string()),
    };
    let answer = answer.unwrap_or_else(|sentence| Answer { error: Some(sentence), ..Answer::default() });
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    stream.write_all(&line).await?;
    stream.shutdown().await
}

fn carry_out(call: Call, registry: &Registry) -> Result<Answer, String> {
    let parse = |text: &str| text.parse::<Address>().map_err(|error| error.to_string());
    let (address, event) = match call {
        Call::List => return Ok(Answer { nodes: registry.list(None), ..Answer::default() }),
        Call::Record { cursor } => {
            return Ok(Answer { recorded: Some(registry.recorded(cursor)), ..Answer::default() });
        }
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
    registry.apply(event).map_err(|refusal| refusal.to_string())?;
    Ok(Answer { nodes: registry.list(Some(&address)), ..Answer::default() })
}
