//! Engines on loopback that use TCP even within one host.

use std::net::{Ipv4Addr, SocketAddr};

use kvlane_fabric::{Engine, EngineOptions, FabricError, Transport};

/// A free port of loopback.
pub(crate) const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub(crate) fn engine() -> Result<Engine, FabricError> {
    let transport = Some(Transport::TCP);
    Engine::new(EngineOptions { listen: vec![ANY], transport, ..EngineOptions::default() })
}

pub(crate) fn address(engine: &Engine) -> Result<SocketAddr, FabricError> {
    engine.describe()?.socket_addresses().next().ok_or(FabricError::Closed)
}
