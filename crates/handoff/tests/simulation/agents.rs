//! Ids, endpoints and addresses of an engine's scheduler and ranks, in each of the engine's runs.

use std::net::SocketAddr;

use kvlane_fabric::{Descriptor, EngineId, Trust};
use kvlane_handoff::Endpoint;

/// Room for a scheduler and its ranks in an engine's numbers.
const NUMBERS: u128 = 16;

/// A process with an engine of the fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Agent {
    pub(crate) engine: usize,
    /// How often the engine was started before.
    pub(crate) run: u64,
    /// None: the scheduler.
    pub(crate) rank: Option<u32>,
}

impl Agent {
    pub(crate) fn id(self) -> EngineId {
        let number = self.rank.map_or(0, |rank| u128::from(rank) + 1);
        EngineId { engine_id: self.engine as u128 * NUMBERS + number, boot_nonce: self.run }
    }

    pub(crate) fn of(id: EngineId) -> Agent {
        let (engine, number) = ((id.engine_id / NUMBERS) as usize, (id.engine_id % NUMBERS) as u32);
        Agent { engine, run: id.boot_nonce, rank: number.checked_sub(1) }
    }

    pub(crate) fn endpoint(self) -> Endpoint {
        let EngineId { engine_id, boot_nonce } = self.id();
        let (addresses, regions) = (Vec::new(), Vec::new());
        Descriptor { boot_nonce, engine_id, trust: Trust::Token, addresses, regions }.to_bytes().unwrap()
    }

    pub(crate) fn scheduler(self) -> Agent {
        Agent { rank: None, ..self }
    }
}

/// Where an engine's scheduler listens, in each run.
pub(crate) fn address(engine: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, engine as u8], 1))
}

pub(crate) fn engine_at(address: SocketAddr) -> usize {
    match address {
        SocketAddr::V4(address) => usize::from(address.ip().octets()[3]),
        SocketAddr::V6(_) => unreachable!("no engine listens there"),
    }
}
