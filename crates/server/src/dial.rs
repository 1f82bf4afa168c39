//! Dials the daemons of a cluster once, for a program that only checks them.

use std::{net::SocketAddr, thread, time::Duration};

use kvlane_cluster::ClusterOptions;
use kvlane_fabric::{Engine, EngineOptions, FabricError};

/// Dials all addresses at once, as a daemon with these options does. For each: why it is not reached, None if it is. Then it
/// has the same token, the same way of encryption and a version of the fabric that this one knows.
///
/// # Errors
/// A file of the certificate is not usable, or the system gives no socket.
pub fn dial(
    options: &ClusterOptions,
    addresses: &[SocketAddr],
    patience: Duration,
) -> Result<Vec<Option<String>>, FabricError> {
    let engine = Engine::new(EngineOptions {
        token: options.token.clone(),
        tls: options.tls.clone(),
        transport: options.transport,
        ..EngineOptions::default()
    })?;
    let dial = |address: &SocketAddr| match engine.connect_to(*address, patience) {
        Ok(peer) => {
            engine.disconnect(peer);
            None
        }
        Err(FabricError::NotReached { why, .. }) => Some(why),
        Err(error) => Some(error.to_string()),
    };
    let outcomes = thread::scope(|scope| {
        let dialling: Vec<_> = addresses.iter().map(|address| scope.spawn(move || dial(address))).collect();
        let lost = || Some("the thread that dialled it has panicked".to_owned());
        dialling.into_iter().map(|each| each.join().unwrap_or_else(|_| lost())).collect()
    });
    engine.close();
    Ok(outcomes)
}
