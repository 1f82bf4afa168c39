//! [`Engine`]: the crate's API. It registers memory and windows, connects peers, begins transfers and messages, and waits for
//! counters.
//!
//! Each call takes the engine's lock for a short time ([`Hold`]), changes the hub, and runs the work that this made due
//! ([`Shared::run_pending`]). Slow work (registration, the check of a transfer, jobs) runs without the lock.
//!
//! # One WRITE by tcp
//!
//! ```text
//!  caller  Engine::begin, Shared::check (engine/beginning.rs)      checks pieces against both sides' regions     no lock
//!          Hub::submit (hub.rs)                                    checks again; the memory is in use            lock
//!          Transfers::next_post (transfers/queue.rs)               picks the path, cuts a chunk                  lock
//!          SocketCarrier::send (carriers/socket/posting.rs)        queues head, runs and ranges                  lock
//!          LinkJob::run (links.rs), Link::flush (tcp/link.rs)      memory --> socket, with checksums             no lock
//!  peer    Link::receive (tcp/link.rs)                             reads head and runs                           no lock
//!          SocketCarrier::take_frame, Regions::for_peer            may this peer write there?                    lock
//!          Link::receive                                           places the bytes while the lease holds        no lock
//!          SocketCarrier::take_body                                queues the Ack                                lock
//!  caller  SocketCarrier::take_outcomes, Transfers::complete       placed; after the last chunk the immediate    lock
//! ```

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

mod beginning;
mod carriers;
mod error;
mod group;
mod handle;
#[cfg(test)]
mod helping;
mod hold;
mod options;
#[cfg(test)]
mod resting;
mod shared;

use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvlane_gpu::{Gpu, GpuError};
use kvlane_memory::RuntimeFolder;

pub use self::error::FabricError;
pub use self::group::{Group, GroupHandle, GroupPart};
pub use self::handle::{Handle, Receiving, SendOptions, Transfer};
use self::hold::Hold;
pub use self::options::{EngineOptions, Transport};
use self::shared::{Registrars, Shared, next_message};
use crate::audit;
use crate::carriers::slots::{SlotPool, Staged};
use crate::carriers::socket::SocketOptions;
use crate::carriers::{CMA, NewCarrier, Setup, built_in};
use crate::control::sockets::{ControlOptions, ControlSockets};
use crate::descriptor::{Access, Descriptor, MemoryKind, REGIONS_MAX, RegionDescriptor};
use crate::fences::Whom;
use crate::hub::socket_hub::{CONTROL, SocketHub};
use crate::hub::{Hub, Outside};
use crate::identity::Identity;
use crate::inbox::{EngineId, MESSAGE_BYTES_MAX, Message};
use crate::process::Process;
use crate::random::{long_random, random};
use crate::region_news::Keys;
use crate::regions::NewRegion;
use crate::registrar::{MemoryRegion, OpenedWindow, Registrar};
use crate::status::PathStatus;
use crate::tcp::Credentials;
use crate::transfers::{CannotSend, Memory, PeerId, Reach, Transfers};
use crate::trust::{Proofs, Trust};
use crate::watch::Watch;
use crate::window::{Ranges, WINDOW_RANGES_MAX, WindowDescriptor, WindowRange};

/// How long memory that its owner takes back may still be read or written for peers, before their connections are ended.
const RELEASE_PATIENCE: Duration = Duration::from_secs(1);
/// After that: the pause between two attempts to end what still touches the memory.
const RELEASE_PAUSE: Duration = Duration::from_millis(50);
/// Addresses of a descriptor that are used; further ones are ignored.
const ADDRESSES_MAX: usize = 16;

/// Moves bytes between registered memory of this process and its peers'.
///
/// One thread of the engine, or [`EngineOptions::socket_threads`] of them, serves peers and advances transfers. A thread that
/// waits for a transfer does that work itself meanwhile, so that a small transfer needs no switch of threads. An idle engine
/// sends a ping to each peer twice a second.
///
/// Writes that a closed or dropped engine had under way may still arrive at its peers for a moment.
///
/// An engine belongs to the process that made it. In a child that this process forks, its calls, and those of the handles and
/// groups that it made, fail as [`FabricError::Forked`]; calls that cannot return that panic. Closing and dropping do nothing
/// there. A child makes an engine of its own.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Listens on the addresses of the options, and starts the engine's thread.
    pub fn new(options: EngineOptions) -> Result<Engine, FabricError> {
        Engine::with_carriers(options, Vec::new())
    }

    /// As [`Engine::new`], with carriers beside those of this crate. [`EngineOptions::transport`] chooses among all of them.
    /// With TLS the engine opens carriers over sockets only, because no other carrier encrypts.
    ///
    /// # Errors
    /// [`FabricError::NoSuchCarrier`] if the options require a carrier that is not there, [`FabricError::SameCarrier`] if two
    /// have one name; else as [`Engine::new`].
    pub fn with_carriers(options: EngineOptions, more: Vec<NewCarrier<'_>>) -> Result<Engine, FabricError> {
        options.check()?;
        let me = Identity { engine: long_random()?, boot: random()? };
        let credentials = options.tls.as_ref().map(Credentials::load).transpose()?.map(Arc::new);
        let proofs = Proofs::new(&options.token, &RuntimeFolder::of_this_user())?;
        let EngineOptions {
            listen,
            advertise,
            connections,
            transport,
            copy_threads,
            socket_threads,
            checksums,
            transfers,
            inbox,
            ..
        } = options;
        // Only carriers over sockets encrypt.
        let allowed = match transport {
            Some(Transport::NONE) => transport,
            _ if credentials.is_some() => Some(Transport::TCP),
            _ => transport,
        };
        // Rings are shared memory between processes of one host, so they go with cma, or with messages alone.
        let has_messages_alone = transport == Some(Transport::NONE) && credentials.is_none();
        let offers_rings = has_messages_alone || allowed.is_none_or(|allowed| allowed.allows(CMA));
        let wants_sums = checksums && credentials.is_none();
        let watch = Watch::new()?;
        let of_control = watch.of(CONTROL);
        let control = ControlOptions {
            me,
            proofs,
            credentials: credentials.clone(),
            listen: &listen,
            offers_rings,
            wants_sums,
        };
        let mut control = ControlSockets::open(of_control, control)?;
        let addresses = if advertise.is_empty() { control.listens_at()? } else { advertise.clone() };
        let sockets = SocketOptions { me, credentials, wants_sums, addresses, connections };
        let (slots, chunk_bytes) = (Arc::new(SlotPool::new(transfers.chunk_bytes)), transfers.chunk_bytes);
        let mut list = built_in(Setup { sockets, slots: Arc::clone(&slots), copy_threads, chunk_bytes });
        list.extend(more);
        let named = carriers::open(list, allowed, &watch)?;
        control.carriers = named.iter().map(|(_, carrier)| carrier.code()).collect();
        let registrars = named.iter().filter_map(|(_, carrier)| Some((carrier.code(), carrier.registrar()?)));
        let registrars = Registrars(registrars.collect());
        let reach = named.iter().fold(Reach::NOTHING, |reach, (_, carrier)| reach.and(carrier.reach()));
        let outside = Outside::new(Process::new(me, inbox), control, named);
        let hub = SocketHub::new(Hub::new(Transfers::new(transfers), outside), watch, advertise)?;
        let shared = Arc::new(Shared::new(hub, registrars, reach, slots, socket_threads));
        let mut engine = Engine { shared, threads: Vec::with_capacity(socket_threads) };
        engine.start_thread("kvlane-fabric", Shared::serve)?;
        for _ in 1..socket_threads {
            engine.start_thread("kvlane-sockets", Shared::help)?;
        }
        Ok(engine)
    }

    /// If it fails, dropping the engine ends the threads that run.
    fn start_thread(&mut self, name: &str, run: fn(&Shared)) -> Result<(), FabricError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&shared))?;
        self.threads.push(thread);
        Ok(())
    }

    /// Registers memory and returns the region's number. Transfers of this process may then read and write it, and peers may do
    /// what `access` allows.
    ///
    /// # Errors
    /// [`FabricError::RegionsFull`]; [`FabricError::Register`] if a carrier fails to register it.
    ///
    /// # Safety
    /// The memory is valid for reads and writes until [`Engine::unregister`] has returned, or the engine was dropped. Peers may
    /// write it at any time, so the caller accesses it only as memory that others may change.
    pub unsafe fn register(&self, memory: *mut u8, len: u64, access: Access) -> Result<u32, FabricError> {
        let base = memory.expose_provenance();
        self.add_region(NewRegion { base, len, access, memory: Memory::Host(0) })
    }

    /// As [`Engine::register`], for memory of a GPU. Bytes between GPUs of one host and one user go straight
    /// ([`Transport::CUDA`]). Others go through pinned memory of the host ([`Staged`]) and sockets. An immediate counts after
    /// the last copy. The engine copies in streams of its own: before a transfer begins, the caller waits for work in other
    /// streams that reads or writes the memory.
    ///
    /// # Errors
    /// [`FabricError::NoWayToGpus`] if no carrier of the engine reaches GPUs; [`FabricError::Gpu`] if the memory is not
    /// allocated on that GPU; else as [`Engine::register`].
    ///
    /// # Safety
    /// The memory stays allocated until [`Engine::unregister`] has returned, or the engine was closed.
    pub unsafe fn register_gpu(
        &self,
        gpu: &Gpu,
        address: u64,
        len: u64,
        access: Access,
    ) -> Result<u32, FabricError> {
        self.shared.own.check()?;
        check_allocated(gpu, address, len)?;
        if !self.shared.reach.overlaps(Reach::GPUS) {
            return Err(FabricError::NoWayToGpus);
        }
        let number = self.shared.try_hub()?.hub.outside.process.gpus.add(gpu);
        audit::takes_time("the preparation of a GPU");
        self.shared.registrars.0.iter().try_for_each(|(_, registrar)| registrar.add_gpu(number, gpu))?;
        let memory = Memory::Gpu(number);
        self.add_region(NewRegion { base: address as usize, len, access, memory })
    }

    /// Registers memory with all carriers, without the lock, because that may be slow. If one fails, the others undo it.
    fn add_region(&self, region: NewRegion) -> Result<u32, FabricError> {
        let reserved = self.shared.try_hub()?.hub.outside.process.regions.reserve();
        let (number, generation) = reserved.ok_or(FabricError::RegionsFull(REGIONS_MAX as usize))?;
        let NewRegion { base, len, access, memory } = region;
        let (address, is_writable) = (base as u64, access == Access::ReadWrite);
        let seen = MemoryRegion { number, generation, address, len, memory, is_writable };
        let mut keys = Keys::new();
        let mut done: Vec<&Arc<dyn Registrar>> = Vec::new();
        audit::takes_time("the registration of memory");
        for (code, registrar) in &self.shared.registrars.0 {
            match registrar.register(&seen) {
                Ok(key) => keys.extend(key.map(|key| (*code, key.into_boxed_slice()))),
                Err(error) => {
                    done.iter().for_each(|registrar| {
                        registrar.withdraw(&seen);
                        registrar.unregister(&seen);
                    });
                    self.shared.try_hub()?.hub.outside.process.regions.remove(number);
                    return Err(error.into());
                }
            }
            done.push(registrar);
        }
        let mut hub = self.shared.try_hub()?;
        hub.hub.outside.process.regions.add(number, region, keys);
        hub.hub.outside.announce_region(number);
        self.shared.run_pending(&mut hub);
        Ok(number)
    }

    /// Counters of the bytes that went to and from GPUs through pinned memory of the host, since the engine was made.
    pub fn staged(&self) -> Staged {
        self.shared.slots.staged()
    }

    /// Takes a region back. When this returns, nothing touches its memory any more, the engine refuses peers that ask for it,
    /// and windows with ranges of it are closed.
    pub fn unregister(&self, region: u32) -> Result<(), FabricError> {
        let mut hub = self.shared.try_hub()?;
        match hub.hub.outside.process.regions.uses(region) {
            0 => {}
            transfers => return Err(FabricError::RegionInUse { region, transfers }),
        }
        let seen = hub.hub.outside.process.regions.seen(region);
        let Some(seen) = seen.filter(|_| hub.hub.outside.process.regions.stop_serving(region)) else {
            return Err(FabricError::NoSuchRegion(region));
        };
        // Carriers may be slow. Meanwhile requests for the region are refused, and its number stays reserved.
        hub.unlocked(|| {
            audit::takes_time("the giving back of memory");
            self.shared.registrars.0.iter().for_each(|(_, registrar)| registrar.withdraw(&seen));
        });
        for window in hub.hub.outside.process.regions.windows_of(region) {
            self.end_window(&mut hub, window);
        }
        hub.hub.outside.announce_region(region);
        self.wait_until_free(
            &mut hub,
            // Another thread may be closing a window of the region: until it has, the window's peer may read on by itself.
            |hub| {
                let outside = &hub.hub.outside;
                !outside.is_touched(region) && outside.process.regions.windows_of(region).is_empty()
            },
            |hub| hub.hub.outside.release_region(region),
        );
        drop(hub);
        audit::takes_time("the giving back of memory");
        self.shared.registrars.0.iter().for_each(|(_, registrar)| registrar.unregister(&seen));
        self.shared.try_hub()?.hub.outside.process.regions.remove(region);
        Ok(())
    }

    /// Lets one peer read ranges of registered memory, until [`Engine::close_window`]. The caller sends the returned descriptor
    /// to the peer, which passes it to [`Transfer::read_through`](crate::Transfer::read_through). `peer` need not be connected
    /// yet. Another start of the same process is another peer.
    ///
    /// # Errors
    /// [`FabricError::Window`] if a range is not registered, or the ranges lie in several memories;
    /// [`FabricError::RegionsFull`] or [`FabricError::WindowsFull`] until others are closed.
    pub fn open_window(
        &self,
        peer: EngineId,
        ranges: Vec<WindowRange>,
    ) -> Result<WindowDescriptor, FabricError> {
        let count = ranges.len();
        let ranges = Ranges::new(ranges).ok_or_else(|| {
            FabricError::Window(format!("{count} ranges; 1 to {WINDOW_RANGES_MAX}, of which each has bytes"))
        })?;
        let mut hub = self.shared.try_hub()?;
        if hub.hub.is_closed {
            return Err(FabricError::Closed);
        }
        let regions = &mut hub.hub.outside.process.regions;
        let memory = regions.memory_of(&ranges)?;
        let (number, generation) = regions.reserve().ok_or(FabricError::RegionsFull(REGIONS_MAX as usize))?;
        drop(hub);
        let opened = OpenedWindow { number, generation, ranges: ranges.all(), memory };
        self.shared.registrars.0.iter().for_each(|(_, registrar)| registrar.open_window(&opened));
        let len = ranges.len();
        let to = Identity { engine: peer.engine_id, boot: peer.boot_nonce };
        let mut hub = self.shared.try_hub()?;
        if let Err(error) = hub.hub.outside.process.regions.open_window(number, to, ranges) {
            // A region was given back meanwhile, or the peer's windows have too many ranges.
            self.shared
                .registrars
                .0
                .iter()
                .for_each(|(_, registrar)| registrar.close_window(number, generation));
            hub.hub.outside.process.regions.remove(number);
            return Err(error.into());
        }
        hub.hub.outside.announce_window(number, to);
        self.shared.run_pending(&mut hub);
        let kind = if matches!(memory, Memory::Gpu(_)) { MemoryKind::Cuda } else { MemoryKind::Host };
        Ok(WindowDescriptor { number, generation, len, kind })
    }

    /// Closes a window. When this returns, the owner may reuse the memory. No byte that is written from now on is part of a
    /// read that succeeds, even if the peer is stopped, cut off, or in the middle of one. A read that was not over fails at
    /// the peer as [`Refused`](crate::Failure::Refused). Takes at most a second, if the peer does not take bytes that are on
    /// their way.
    pub fn close_window(&self, window: &WindowDescriptor) -> Result<(), FabricError> {
        let WindowDescriptor { number, generation, .. } = *window;
        let mut hub = self.shared.try_hub()?;
        let is_it = hub.hub.outside.process.regions.is_window(number, generation);
        if !is_it || !self.end_window(&mut hub, number) {
            return Err(FabricError::NoSuchWindow(number));
        }
        Ok(())
    }

    /// Closes a window and waits until nothing is read through it. False: there is no such window, or another thread closes it
    /// already.
    fn end_window(&self, hub: &mut Hold<'_>, number: u32) -> bool {
        let stopped = hub.hub.outside.process.regions.stop_serving_window(number);
        let Some((generation, to)) = stopped else { return false };
        // The number stays reserved meanwhile.
        hub.unlocked(|| {
            audit::takes_time("the closing of a window");
            self.shared
                .registrars
                .0
                .iter()
                .for_each(|(_, registrar)| registrar.close_window(number, generation));
        });
        hub.hub.outside.announce_window(number, to);
        self.wait_until_free(
            hub,
            |hub| !hub.hub.outside.is_window_read(number),
            |hub| hub.hub.outside.release_window(number),
        );
        hub.hub.outside.process.regions.remove(number);
        true
    }

    /// Waits until `is_free`. After [`RELEASE_PATIENCE`] it calls `release` again and again, to end what still touches the
    /// memory.
    fn wait_until_free(
        &self,
        hub: &mut Hold<'_>,
        is_free: impl Fn(&SocketHub) -> bool,
        release: impl Fn(&mut SocketHub),
    ) {
        hub.hub.outside.process.releasing += 1;
        let deadline = Instant::now() + RELEASE_PATIENCE;
        let mut free = self.shared.wait(hub, Some(deadline), |hub| is_free(hub).then_some(()));
        // No bound: a driver's copy cannot be stopped, and a link that a job has can be ended only when the job is back.
        while free.is_none() {
            release(hub);
            self.shared.run_pending(hub);
            let deadline = Instant::now() + RELEASE_PAUSE;
            free = self.shared.wait(hub, Some(deadline), |hub| is_free(hub).then_some(()));
        }
        hub.hub.outside.process.releasing -= 1;
    }

    /// Windows that are open or being closed.
    pub fn windows(&self) -> usize {
        self.shared.hub().hub.outside.process.regions.windows()
    }

    /// A descriptor of this engine: its addresses, what to prove to it, and the regions that are registered now.
    pub fn describe(&self) -> Result<Descriptor, FabricError> {
        Ok(self.shared.try_hub()?.descriptor()?)
    }

    /// Adds a peer by its descriptor, and begins to connect to it. Transfers may begin at once.
    pub fn connect(&self, descriptor: &Descriptor) -> Result<PeerId, FabricError> {
        let addresses: Vec<SocketAddr> = descriptor.socket_addresses().take(ADDRESSES_MAX).collect();
        if addresses.is_empty() {
            return Err(FabricError::NoAddress);
        }
        let identity = Some(Identity { engine: descriptor.engine_id, boot: descriptor.boot_nonce });
        let mut hub = self.shared.try_hub()?;
        let key = hub.hub.outside.control.proofs.key_for(&descriptor.trust)?;
        let whom = Whom { identity, session: long_random()?, key, addresses };
        let peer = self.add_peer(&mut hub, whom, descriptor.trust.clone())?;
        if let Some(known) = hub.hub.outside.peer_mut(peer) {
            known.introduce(descriptor);
        }
        self.shared.run_pending(&mut hub);
        Ok(peer)
    }

    /// Adds a peer by the address at which it listens, and waits until it has announced its regions. Before that both sides
    /// prove this engine's token, or its user's secret.
    ///
    /// # Errors
    /// [`FabricError::NotReached`] if `timeout` passes first; [`FabricError::NoSharedSecret`] if this engine has neither a
    /// token nor a user's secret.
    pub fn connect_to(&self, address: SocketAddr, timeout: Duration) -> Result<PeerId, FabricError> {
        let mut hub = self.shared.try_hub()?;
        let proofs = &hub.hub.outside.control.proofs;
        if matches!(proofs.trust, Trust::Own(_)) {
            return Err(FabricError::NoSharedSecret);
        }
        let (key, trust) = (proofs.own.clone(), proofs.trust.clone());
        let whom = Whom { identity: None, session: long_random()?, key, addresses: vec![address] };
        let peer = self.add_peer(&mut hub, whom, trust)?;
        self.shared.run_pending(&mut hub);
        let has_announced = |hub: &mut SocketHub| hub.hub.outside.peer(peer)?.has_announced.then_some(());
        if self.shared.wait(&mut hub, Some(Instant::now() + timeout), has_announced).is_some() {
            return Ok(peer);
        }
        let trouble = hub.path_statuses(peer).into_iter().find_map(|path| path.trouble);
        let why = trouble.unwrap_or_else(|| "no answer yet".into());
        hub.hub.remove_peer(peer);
        self.shared.run_pending(&mut hub);
        Err(FabricError::NotReached { address, why })
    }

    #[cfg(test)]
    pub(crate) fn hold(&self) -> Hold<'_> {
        self.shared.hub()
    }

    #[cfg(test)]
    pub(crate) fn audit(&self) -> &audit::Audit {
        &self.shared.audit
    }

    fn add_peer(&self, hub: &mut Hold<'_>, whom: Whom, trust: Trust) -> Result<PeerId, FabricError> {
        if hub.hub.is_closed {
            return Err(FabricError::Closed);
        }
        hub.hub.add_peer(whom, trust).ok_or(FabricError::Closed)
    }

    /// Adds the regions of a peer's newer descriptor. A peer that is connected announces its regions itself.
    pub fn update(&self, peer: PeerId, descriptor: &Descriptor) -> Result<(), FabricError> {
        let mut hub = self.shared.try_hub()?;
        let known = hub.hub.outside.peer_mut(peer).is_some_and(|known| known.describe(descriptor));
        hub.hub.outside.notify_regions_changed(peer);
        self.shared.run_pending(&mut hub);
        known.then_some(()).ok_or(FabricError::NoSuchPeer)
    }

    /// The regions of a peer that transfers may name, as far as they are known here.
    pub fn regions(&self, peer: PeerId) -> Result<Vec<RegionDescriptor>, FabricError> {
        let hub = self.shared.try_hub()?;
        Ok(hub.hub.outside.peer(peer).ok_or(FabricError::NoSuchPeer)?.descriptors())
    }

    /// The sender that messages of a peer name. None: there is no such peer, or it was added by its address and has not
    /// answered yet.
    pub fn peer_id(&self, peer: PeerId) -> Option<EngineId> {
        let identity = self.shared.hub().hub.outside.peer(peer)?.whom.identity?;
        Some(EngineId { engine_id: identity.engine, boot_nonce: identity.boot })
    }

    /// The paths to a peer, and why those that are not up are down. Empty if there is no such peer.
    pub fn paths(&self, peer: PeerId) -> Vec<PathStatus> {
        self.shared.hub().path_statuses(peer)
    }

    /// Measures how long the engine's lock is held each time from now on, for benchmarks: each measurement takes a system call.
    pub fn measure_holds(&self) {
        self.shared.hub().holds = Some(Vec::new());
    }

    /// Returns what was measured since [`Engine::measure_holds`], at most 2^20 holds, and stops measuring.
    pub fn take_holds(&self) -> Vec<crate::HoldTime> {
        self.shared.hub().holds.take().unwrap_or_default()
    }

    /// Connections of either side that ended because a checksum differed, since the engine was made
    /// ([`EngineOptions::checksums`]).
    pub fn checksum_errors(&self) -> u64 {
        self.shared.hub().hub.outside.process.checksum_errors
    }

    /// Control connections of either side to processes of this host that could not use shared memory, since the engine was
    /// made. [`PathStatus::no_rings`] says why.
    pub fn connections_without_rings(&self) -> u64 {
        self.shared.hub().hub.outside.control.without_rings
    }

    /// Sets the name that the log prints beside the peer's addresses.
    pub fn name_peer(&self, peer: PeerId, label: String) {
        if let Some(known) = self.shared.hub().hub.outside.peer_mut(peer) {
            known.label = label;
        }
    }

    /// Sets no limit to the silence of a process of this host, because it may get no processor for long. Its connections end
    /// when the kernel closes its sockets. Other peers count as gone after 10 s of silence. Both sides have to call this.
    pub fn allow_silence(&self, peer: EngineId) {
        let EngineId { engine_id: engine, boot_nonce: boot } = peer;
        self.shared.hub().hub.outside.control.silent.insert(Identity { engine, boot });
    }

    /// Fails all transfers with a peer, and closes its connections. Writes are over once the peer has confirmed that it places
    /// nothing more, or within 3 seconds. Writes that a process of this host was to read have no such limit: they wait for the
    /// confirmation, or for the end of that process.
    pub fn disconnect(&self, peer: PeerId) {
        let mut hub = self.shared.hub();
        hub.hub.remove_peer(peer);
        self.shared.run_pending(&mut hub);
    }

    /// Begins a transfer. The memory of both sides belongs to it until it is over.
    pub fn begin(&self, peer: PeerId, transfer: Transfer) -> Result<Handle, FabricError> {
        self.shared.begin(peer, &transfer)
    }

    /// A [`Group`] of these peers, in this order.
    pub fn group(&self, peers: &[PeerId]) -> Result<Group, FabricError> {
        Group::new(Arc::clone(&self.shared), peers)
    }

    /// Sends a message of at most [`MESSAGE_BYTES_MAX`] bytes to a peer, which takes it by [`Engine::receive`].
    ///
    /// It is delivered once, or fails. Messages have no order, neither among each other nor with transfers. If the peer has no
    /// room, the message is sent again after pauses of 1 to 100 ms ([`crate::Options::room_pause`]), and fails as
    /// [`crate::Failure::NoRoom`] at its deadline. A message that fails for another reason may have been delivered, or may still
    /// be for a moment if a connection broke; never twice.
    pub fn send(
        &self,
        peer: PeerId,
        bytes: impl Into<Arc<[u8]>>,
        options: SendOptions,
    ) -> Result<Handle, FabricError> {
        let bytes = bytes.into();
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(FabricError::MessageTooLong(bytes.len()));
        }
        let mut hub = self.shared.try_hub()?;
        if hub.hub.is_closed {
            return Err(FabricError::Closed);
        }
        hub.hub.outside.peer(peer).ok_or(FabricError::NoSuchPeer)?;
        let now = hub.hub.now();
        let deadline = now.saturating_add(options.timeout);
        let sent = hub.hub.transfers.send(now, peer, bytes, deadline, options.priority);
        let ticket = sent.map_err(|why| match why {
            CannotSend::Full(full) => FabricError::Full(full.0),
            CannotSend::Bytes(bytes) => FabricError::MessagesFull(bytes),
        })?;
        hub.hub.outcomes.want(ticket);
        self.shared.run_pending(&mut hub);
        drop(hub);
        Ok(Handle { shared: Arc::clone(&self.shared), ticket })
    }

    /// Takes the oldest message that has arrived, of any peer. None: none arrived within `timeout`, or the engine is closed and
    /// all have been taken.
    ///
    /// Messages that nothing takes fill the inbox ([`EngineOptions::inbox`]). Then peers find no room for theirs.
    pub fn receive(&self, timeout: Option<Duration>) -> Option<Message> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut hub = self.shared.hub();
        self.shared.wait(&mut hub, deadline, next_message).flatten()
    }

    /// As [`Engine::receive`], as a future. If it is dropped before it is ready, it has taken nothing.
    pub fn receiving(&self) -> Receiving {
        let receiver = self.shared.hub().hub.outcomes.add_receiver();
        Receiving::new(Arc::clone(&self.shared), receiver)
    }

    /// The sender that messages from here name. The descriptor has the same.
    pub fn id(&self) -> EngineId {
        let me = self.shared.hub().hub.outside.process.me;
        EngineId { engine_id: me.engine, boot_nonce: me.boot }
    }

    /// Whether [`Engine::close`] was called.
    pub fn is_closed(&self) -> bool {
        self.shared.hub().hub.is_closed
    }

    /// Opens a counter of this process and returns its generation, which peers' immediates for it must carry.
    pub fn open_counter(&self, counter: u32) -> u32 {
        self.shared.hub().hub.outside.process.immediates.open(counter)
    }

    /// The immediates that have arrived for a counter of this generation.
    pub fn count(&self, counter: u32, generation: u32) -> u64 {
        self.shared.hub().hub.outside.process.immediates.count(counter, generation)
    }

    /// Ends a generation of a counter, and returns the next one.
    pub fn retire_counter(&self, counter: u32, generation: u32) -> u32 {
        let mut hub = self.shared.hub();
        let next = hub.hub.outside.process.immediates.retire(counter, generation);
        hub.hub.outcomes.note_change();
        self.shared.wake_waiters(&mut hub);
        next
    }

    /// Whether a counter of this generation counts no more, because it was retired or the engine was closed.
    pub fn is_counter_over(&self, counter: u32, generation: u32) -> bool {
        let hub = self.shared.hub();
        hub.hub.is_closed || hub.hub.outside.process.immediates.is_retired(counter, generation)
    }

    /// Waits until `target` immediates have arrived. False: `timeout` passed first, or the counter was retired, or the engine
    /// was closed.
    pub fn wait_count(&self, counter: u32, generation: u32, target: u64, timeout: Option<Duration>) -> bool {
        let mut hub = self.shared.hub();
        let reached = |hub: &mut SocketHub| {
            let immediates = &hub.hub.outside.process.immediates;
            let has = immediates.count(counter, generation) >= target;
            let is_over = hub.hub.is_closed || immediates.is_retired(counter, generation);
            (has || is_over).then_some(has)
        };
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.shared.wait(&mut hub, deadline, reached).unwrap_or(false)
    }

    /// Fails all transfers and closes all connections, for good. When this returns, nothing touches this process's memory any
    /// more, also if other threads still use the engine, and all waiting calls return. One exception: a process of this host
    /// that is stopped while it reads a write of ours may read on for a moment when it continues.
    ///
    /// Does nothing in another process than the engine's.
    pub fn close(&self) {
        if !self.shared.is_here() {
            return;
        }
        let mut hub = self.shared.hub();
        hub.close();
        let deadline = Instant::now() + RELEASE_PATIENCE;
        let is_read = |hub: &mut SocketHub| (!hub.hub.outside.is_pulled()).then_some(());
        self.shared.wait(&mut hub, Some(deadline), is_read);
        // No bound: a job that runs on another thread, or a driver's copy, cannot be stopped. But pauses, because this may be the
        // engine's own thread, which nobody wakes.
        let has_ended = |hub: &mut SocketHub| (!hub.hub.outside.is_ending()).then_some(());
        while self.shared.wait(&mut hub, Some(Instant::now() + RELEASE_PAUSE), has_ended).is_none() {}
        hub.finish();
        self.shared.stop(&mut hub);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            // The parent still uses the engine. Its threads do not exist in this process, and what they share must not end.
            let _threads = ManuallyDrop::new(std::mem::take(&mut self.threads));
            let _shared = ManuallyDrop::new(Arc::clone(&self.shared));
            return;
        }
        self.close();
        let is_itself = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        for thread in self.threads.drain(..).filter(|thread| !is_itself(thread)) {
            audit::takes_time("the end of a thread");
            // The thread does not panic. If it did, there would be nothing left to end.
            let ended = thread.join();
            debug_assert!(ended.is_ok() || std::thread::panicking(), "a thread of the engine panicked");
        }
    }
}

/// Checks that all bytes are device memory of this GPU. They may lie in several allocations.
fn check_allocated(gpu: &Gpu, address: u64, len: u64) -> Result<(), GpuError> {
    let (driver, device) = gpu.raw();
    let end =
        address.checked_add(len).ok_or_else(|| GpuError::Invalid(format!("{len} bytes at {address:#x}")))?;
    let mut at = address;
    while at < end {
        let (base, bytes) = driver.address_range(device, at)?;
        at = base.saturating_add(bytes).max(at + 1);
    }
    Ok(())
}
