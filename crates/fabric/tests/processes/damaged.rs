//! Networks that change bytes in ways that TCP's checksum misses.

use kvlane_fabric::{EngineOptions, Options, Pieces, Transfer};

use crate::load::Load;
use crate::proxy::{Proxy, through};
use crate::side::{Side, by_tcp, done, quick};
use crate::support::{MIB, PATIENCE};

#[test]
fn bytes_that_are_changed_on_the_way_are_sent_again() {
    for connections in [1, 3] {
        let there = Side::of(Load::COUNT * Load::EACH);
        let proxy = Proxy::to(&there.descriptor());
        let descriptor = through(&there.descriptor(), &[&proxy]);
        let transfers = Options { breaks_max: 100, peer_patience: PATIENCE, ..quick() };
        let options = EngineOptions { connections, transfers, ..by_tcp() };
        let load = Load::begin(there, &descriptor, options);
        // Heads, bytes and sums, both ways.
        proxy.damage(20, 4 * MIB as u64 + 54_321);
        load.end();
        proxy.wait_until_damaged();
    }
}

/// The control, and what the option says: without checksums on one side nothing finds it.
#[test]
fn without_checksums_changed_bytes_arrive() {
    for (here_has, there_has) in [(true, false), (false, true), (true, true)] {
        let bytes = 32 * MIB;
        let there = Side::new(bytes, EngineOptions { checksums: there_has, ..by_tcp() });
        let here = Side::new(bytes, EngineOptions { checksums: here_has, ..by_tcp() });
        here.memory.scribble(0, bytes, 5);
        let proxy = Proxy::to(&there.descriptor());
        let peer = here.meet(&through(&there.descriptor(), &[&proxy]));
        // All of the connections is there before.
        let write = |len| Transfer::write(Pieces::Contiguous(here.run(peer, 0, 0, len)));
        done(&here.engine.begin(peer.id, write(1)).unwrap());
        proxy.damage_bytes();
        done(&here.engine.begin(peer.id, write(bytes)).unwrap());
        proxy.wait_until_damaged();
        let is_right = there.memory.bytes(0, bytes) == here.memory.bytes(0, bytes);
        assert_eq!(is_right, here_has && there_has);
        let found = here.engine.checksum_errors() + there.engine.checksum_errors();
        assert_eq!(found, u64::from(here_has && there_has));
    }
}
