//! The transfer engine of a process: memory, peers, transfers, counters.

#![allow(unsafe_code, reason = "the kernel reads and writes registered memory")]

mod beginning;
mod carriers;
mod error;
mod group;
mod handle;
mod hold;
mod options;
mod shared;

use std::mem::ManuallyDrop;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
use crate::carriers::{CMA, NewCarrier, Setup, own};
use crate::control::sockets::ControlSockets;
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

/// How long memory that is given back may still be read or written for peers, before their connections are ended.
const LET_GO: Duration = Duration::from_secs(1);
/// How long after that it is looked at what still touches it.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Addresses of one peer that are used.
const ADDRESSES_MAX: usize = 16;

/// Moves bytes between registered memory of this process and its peers'.
///
/// One thread serves peers and carries transfers on; whoever waits for one does that work meanwhile, so that a small
/// transfer needs no switch of threads. Idle, nothing runs but a word to each peer twice a second.
///
/// What a closed or dropped engine had under way may still arrive at its peers for a moment.
///
/// An engine belongs to the process that made it. In a child that this process forks, its calls and those of all that it
/// made fail as [`FabricError::Forked`] or, where they return no such error, panic; closing and dropping do nothing there. A
/// child makes an engine of its own.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Listens, and starts its thread.
    pub fn new(options: EngineOptions) -> Result<Engine, FabricError> {
        Engine::with_carriers(options, Vec::new())
    }

    /// As [`Engine::new`], with carriers beside those of this crate. [`EngineOptions::transport`] chooses among all of them.
    /// With TLS the engine opens carriers over sockets only, because no other carrier encrypts.
    ///
    /// # Errors
    /// [`FabricError::NoSuchCarrier`] and [`FabricError::SameCarrier`] where the names do not fit; as [`Engine::new`].
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
            checksums,
            transfers,
            inbox,
            ..
        } = options;
        // Only sockets encrypt.
        let allowed = if credentials.is_some() { Some(Transport::TCP) } else { transport };
        // Rings go through memory that processes of one host share, as cma does.
        let has_rings = allowed.is_none_or(|allowed| allowed.allows(CMA));
        let wants_sums = checksums && credentials.is_none();
        let watch = Watch::new()?;
        let of_control = watch.of(CONTROL);
        let mut control = ControlSockets::open(
            me,
            proofs,
            credentials.clone(),
            of_control,
            &listen,
            has_rings,
            wants_sums,
        )?;
        let addresses = if advertise.is_empty() { control.listens_at()? } else { advertise.clone() };
        let sockets = SocketOptions { me, credentials, wants_sums, addresses, connections };
        let (slots, chunk_bytes) = (Arc::new(SlotPool::new(transfers.chunk_bytes)), transfers.chunk_bytes);
        let mut list = own(Setup { sockets, slots: Arc::clone(&slots), copy_threads, chunk_bytes });
        list.extend(more);
        let named = carriers::open(list, allowed, &watch)?;
        control.carriers = named.iter().map(|(_, carrier)| carrier.code()).collect();
        let registrars = named.iter().filter_map(|(_, carrier)| Some((carrier.code(), carrier.registrar()?)));
        let registrars = Registrars(registrars.collect());
        let reach = named.iter().fold(Reach::NOTHING, |reach, (_, carrier)| reach.and(carrier.reach()));
        let outside = Outside::new(Process::new(me, inbox), control, named);
        let hub = SocketHub::new(Hub::new(Transfers::new(transfers), outside), watch, advertise)?;
        let shared = Arc::new(Shared::new(hub, registrars, reach, slots));
        let thread = std::thread::Builder::new().name("kvlane-fabric".into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.serve()
        })?;
        Ok(Engine { shared, thread: Some(thread) })
    }

    /// Lets transfers touch memory: those of this process both ways, those of peers as `access` says. Answers its number.
    ///
    /// # Errors
    /// [`FabricError::RegionsFull`]; [`FabricError::Register`] if a carrier cannot.
    ///
    /// # Safety
    /// The memory is valid for reads and writes until [`Engine::unregister`] has given it back, or the engine was dropped.
    /// Others may write it at any time, so that it is read and written only as such memory may be.
    pub unsafe fn register(&self, memory: *mut u8, len: u64, access: Access) -> Result<u32, FabricError> {
        let base = memory.expose_provenance();
        self.add_region(NewRegion { base, len, access, memory: Memory::Host(0) })
    }

    /// As [`Engine::register`], of a GPU's memory. Its bytes go through pinned memory of the host ([`Staged`]) and through
    /// sockets, also where the host's memory goes by [`Transport::CMA`]. An immediate comes after the last copy. The engine
    /// copies in streams of its own: what others enqueued that writes or reads the memory has to be over when a transfer
    /// begins.
    ///
    /// # Errors
    /// [`FabricError::NoWayToGpus`] if no carrier of the engine reaches GPUs; [`FabricError::Gpu`] if the memory is not allocated on
    /// that GPU, or its driver gives no pinned memory; as [`Engine::register`].
    ///
    /// # Safety
    /// The memory stays allocated until [`Engine::unregister`] has given it back, or the engine was closed.
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

    /// Registers memory with all carriers, outside of the lock: that may take its time, and fail.
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
        self.shared.set_going(&mut hub);
        Ok(number)
    }

    /// What went through pinned memory of the host, to GPUs and from them, since the engine was made.
    pub fn staged(&self) -> Staged {
        self.shared.slots.staged()
    }

    /// Gives memory back: when this returns nothing touches it any more, and peers that ask for it are refused. Windows that
    /// show bytes of it are closed.
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
        // Carriers may take their time for it. Nothing is served of the region meanwhile, and its number is not free.
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
            // Somebody else may be about to close a window: until it is closed its peer may read on by itself.
            |hub| {
                let outside = &hub.hub.outside;
                !outside.is_touched(region) && outside.process.regions.windows_of(region).is_empty()
            },
            |hub| hub.hub.outside.let_go(region),
        );
        drop(hub);
        audit::takes_time("the giving back of memory");
        self.shared.registrars.0.iter().for_each(|(_, registrar)| registrar.unregister(&seen));
        self.shared.try_hub()?.hub.outside.process.regions.remove(region);
        Ok(())
    }

    /// Lets one peer read ranges of registered memory, until [`Engine::close_window`]. The peer reads by
    /// [`Transfer::read_through`](crate::Transfer::read_through), with the descriptor that this answers: it travels as you like.
    /// `peer` need not be connected now; another start of it is another peer.
    ///
    /// # Errors
    /// [`FabricError::Window`] for ranges that are not registered or in several memories; [`FabricError::RegionsFull`] and
    /// [`FabricError::WindowsFull`] until others are closed.
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
            // Somebody gives a region back meanwhile, or the peer has no room.
            self.shared
                .registrars
                .0
                .iter()
                .for_each(|(_, registrar)| registrar.close_window(number, generation));
            hub.hub.outside.process.regions.remove(number);
            return Err(error.into());
        }
        hub.hub.outside.announce_window(number, to);
        self.shared.set_going(&mut hub);
        let kind = if matches!(memory, Memory::Gpu(_)) { MemoryKind::Cuda } else { MemoryKind::Host };
        Ok(WindowDescriptor { number, generation, len, kind })
    }

    /// Closes a window: when this returns, whatever is written to its memory does not reach the peer through it, whether the
    /// peer is stopped, cut off, or in the middle of a read. A read that was not over fails there as
    /// [`Refused`](crate::Failure::Refused). Takes a second at the most, where a peer takes no bytes that are on their way.
    pub fn close_window(&self, window: &WindowDescriptor) -> Result<(), FabricError> {
        let WindowDescriptor { number, generation, .. } = *window;
        let mut hub = self.shared.try_hub()?;
        let is_it = hub.hub.outside.process.regions.is_window(number, generation);
        if !is_it || !self.end_window(&mut hub, number) {
            return Err(FabricError::NoSuchWindow(number));
        }
        Ok(())
    }

    /// False: there is no such window, or somebody else closes it already.
    fn end_window(&self, hub: &mut Hold<'_>, number: u32) -> bool {
        let stopped = hub.hub.outside.process.regions.stop_serving_window(number);
        let Some((generation, to)) = stopped else { return false };
        // The number is not free meanwhile.
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
            |hub| !hub.hub.outside.is_read_through(number),
            |hub| hub.hub.outside.let_go_through(number),
        );
        hub.hub.outside.process.regions.remove(number);
        true
    }

    /// Waits until memory is not touched any more, and ends what touches it for too long.
    fn wait_until_free(
        &self,
        hub: &mut Hold<'_>,
        is_free: impl Fn(&SocketHub) -> bool,
        let_go: impl Fn(&mut SocketHub),
    ) {
        hub.hub.outside.process.releasing += 1;
        let deadline = Instant::now() + LET_GO;
        let mut free = self.shared.wait(hub, Some(deadline), |hub| is_free(hub).then_some(()));
        // A driver cannot be told to stop; and what a job has is looked at when it is back.
        while free.is_none() {
            let_go(hub);
            self.shared.set_going(hub);
            free = self.shared.wait(hub, Some(Instant::now() + LOOK_AGAIN), |hub| is_free(hub).then_some(()));
        }
        hub.hub.outside.process.releasing -= 1;
    }

    /// Windows that are open.
    pub fn windows(&self) -> usize {
        self.shared.hub().hub.outside.process.regions.windows()
    }

    /// What peers have to know of this process and all memory that is registered now.
    pub fn describe(&self) -> Result<Descriptor, FabricError> {
        Ok(self.shared.try_hub()?.descriptor()?)
    }

    /// A peer, by what it tells of itself. Connections are made meanwhile.
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
        self.shared.set_going(&mut hub);
        Ok(peer)
    }

    /// A peer, by the address at which it listens: both sides prove what this engine proves to others of its kind (its token, or
    /// its user's secret) before anything else is said. Waits until the peer has told what it has registered.
    ///
    /// # Errors
    /// [`FabricError::NotReached`] if it has not by then; [`FabricError::NoSharedSecret`] if this engine has none that others know.
    pub fn connect_to(&self, address: SocketAddr, timeout: Duration) -> Result<PeerId, FabricError> {
        let mut hub = self.shared.try_hub()?;
        let proofs = &hub.hub.outside.control.proofs;
        if matches!(proofs.trust, Trust::Own(_)) {
            return Err(FabricError::NoSharedSecret);
        }
        let (key, trust) = (proofs.own.clone(), proofs.trust.clone());
        let whom = Whom { identity: None, session: long_random()?, key, addresses: vec![address] };
        let peer = self.add_peer(&mut hub, whom, trust)?;
        self.shared.set_going(&mut hub);
        let has_told = |hub: &mut SocketHub| hub.hub.outside.peer(peer)?.has_announced.then_some(());
        let told = self.shared.wait(&mut hub, Some(Instant::now() + timeout), has_told);
        if told.is_some() {
            return Ok(peer);
        }
        let trouble = hub.path_statuses(peer).into_iter().find_map(|path| path.trouble);
        let why = trouble.unwrap_or_else(|| "no answer yet".into());
        hub.hub.remove_peer(peer);
        self.shared.set_going(&mut hub);
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

    /// Takes note of what memory a peer has registered since. A peer that is connected tells that itself.
    pub fn update(&self, peer: PeerId, descriptor: &Descriptor) -> Result<(), FabricError> {
        let mut hub = self.shared.try_hub()?;
        let known = hub.hub.outside.peer_mut(peer).is_some_and(|known| known.describe(descriptor));
        hub.hub.outside.peer_has_changed(peer);
        self.shared.set_going(&mut hub);
        known.then_some(()).ok_or(FabricError::NoSuchPeer)
    }

    /// What a peer has registered, as far as it is known.
    pub fn regions(&self, peer: PeerId) -> Result<Vec<RegionDescriptor>, FabricError> {
        let hub = self.shared.try_hub()?;
        Ok(hub.hub.outside.peer(peer).ok_or(FabricError::NoSuchPeer)?.descriptors())
    }

    /// Who messages from a peer are from; None if there is no such peer, or one that is known by its address only has not
    /// answered.
    pub fn peer_id(&self, peer: PeerId) -> Option<EngineId> {
        let identity = self.shared.hub().hub.outside.peer(peer)?.whom.identity?;
        Some(EngineId { engine_id: identity.engine, boot_nonce: identity.boot })
    }

    /// The ways to a peer, and what is wrong with those that are not up; none if there is no such peer.
    pub fn paths(&self, peer: PeerId) -> Vec<PathStatus> {
        self.shared.hub().path_statuses(peer)
    }

    /// Measures how long the engine's lock is held each time from now on, for benchmarks: each measurement takes a system call.
    pub fn measure_holds(&self) {
        self.shared.hub().holds = Some(Vec::new());
    }

    /// What was measured since [`Engine::measure_holds`], a million holds at the most; nothing is measured any more.
    pub fn take_holds(&self) -> Vec<crate::HoldTime> {
        self.shared.hub().holds.take().unwrap_or_default()
    }

    /// Connections of either side that ended since a checksum differed, ever: [`EngineOptions::checksums`].
    pub fn checksum_errors(&self) -> u64 {
        self.shared.hub().hub.outside.process.checksum_errors
    }

    /// Control connections of either side to processes of this host that had to do without shared memory, ever:
    /// [`PathStatus::no_rings`] says why.
    pub fn connections_without_rings(&self) -> u64 {
        self.shared.hub().hub.outside.control.without_rings
    }

    /// Sets the name that the log prints beside the peer's addresses.
    pub fn name_peer(&self, peer: PeerId, label: String) {
        if let Some(known) = self.shared.hub().hub.outside.peer_mut(peer) {
            known.label = label;
        }
    }

    /// Lets a process of this host be silent without limit, because it may get no processor. Its connections end when the kernel
    /// closes them at its end. Other peers count as gone after 10 s of silence. Both sides have to call this.
    pub fn allow_silence(&self, peer: EngineId) {
        let EngineId { engine_id: engine, boot_nonce: boot } = peer;
        self.shared.hub().hub.outside.control.silent.insert(Identity { engine, boot });
    }

    /// Ends all transfers with a peer as failed, and its connections. Those that wrote are over as soon as the peer has
    /// confirmed it, or within a few seconds; those that a process of this host was to read are not over before that.
    pub fn disconnect(&self, peer: PeerId) {
        let mut hub = self.shared.hub();
        hub.hub.remove_peer(peer);
        self.shared.set_going(&mut hub);
    }

    /// Begins a transfer. Its memory of both sides belongs to it until it is over.
    pub fn begin(&self, peer: PeerId, transfer: Transfer) -> Result<Handle, FabricError> {
        self.shared.begin(peer, &transfer)
    }

    /// These peers, in this order, as one: see [`Group`].
    pub fn group(&self, peers: &[PeerId]) -> Result<Group, FabricError> {
        Group::new(Arc::clone(&self.shared), peers)
    }

    /// Sends a message of at most [`MESSAGE_BYTES_MAX`] bytes to a peer, which takes it by [`Engine::receive`].
    ///
    /// It is delivered once, or fails; messages have no order, among each other or with transfers. Where the peer has no
    /// room for it, it is sent again with pauses of 1 to 100 ms ([`crate::Options::room_pause`]), and fails at last as
    /// [`crate::Failure::NoRoom`]. One that failed for another reason may have been delivered, or may still be for a moment where
    /// a connection broke; never twice.
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
        self.shared.set_going(&mut hub);
        drop(hub);
        Ok(Handle { shared: Arc::clone(&self.shared), ticket })
    }

    /// A message of any peer, of those that arrived the one that waits the longest. None: not in this time, or the engine
    /// was closed and nothing is left that arrived before.
    ///
    /// What is not taken fills the inbox ([`EngineOptions::inbox`]); then peers are told that there is no room.
    pub fn receive(&self, timeout: Option<Duration>) -> Option<Message> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut hub = self.shared.hub();
        self.shared.wait(&mut hub, deadline, next_message).flatten()
    }

    /// As [`Engine::receive`], for tasks. Dropped before it is ready, it has taken nothing.
    pub fn receiving(&self) -> Receiving {
        let receiver = self.shared.hub().hub.outcomes.add_receiver();
        Receiving::new(Arc::clone(&self.shared), receiver)
    }

    /// What messages from here say of their sender; the same as in the descriptor.
    pub fn id(&self) -> EngineId {
        let me = self.shared.hub().hub.outside.process.me;
        EngineId { engine_id: me.engine, boot_nonce: me.boot }
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.shared.hub().hub.is_closed
    }

    /// Names a counter of this process: peers' immediates for it are to carry the generation that is answered.
    pub fn open_counter(&self, counter: u32) -> u32 {
        self.shared.hub().hub.outside.process.immediates.open(counter)
    }

    /// How many immediates have arrived for a counter of this generation.
    pub fn count(&self, counter: u32, generation: u32) -> u64 {
        self.shared.hub().hub.outside.process.immediates.count(counter, generation)
    }

    /// Ends a counter's use, and answers the generation of the next.
    pub fn retire_counter(&self, counter: u32, generation: u32) -> u32 {
        let mut hub = self.shared.hub();
        let next = hub.hub.outside.process.immediates.retire(counter, generation);
        hub.hub.outcomes.note_change();
        self.shared.wake_waiters(&mut hub);
        next
    }

    /// Whether nothing counts for this use of a counter any more: it was retired, or the engine closed.
    pub fn is_counter_over(&self, counter: u32, generation: u32) -> bool {
        let hub = self.shared.hub();
        hub.hub.is_closed || hub.hub.outside.process.immediates.is_retired(counter, generation)
    }

    /// Waits until so many immediates have arrived. False: not in this time, or this use of the counter or the
    /// engine has ended.
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

    /// Ends all transfers as failed and all connections, for good: when this returns nothing of this process's memory is
    /// touched any more, whoever else still has the engine in hand, and all who wait are told. Only a process of this host
    /// that is stopped while it takes a write of ours may read on for a moment when it goes on.
    ///
    /// Does nothing in another process than the engine's.
    pub fn close(&self) {
        if !self.shared.is_here() {
            return;
        }
        let mut hub = self.shared.hub();
        hub.close();
        let deadline = Instant::now() + LET_GO;
        let is_read = |hub: &mut SocketHub| (!hub.hub.outside.is_pulled()).then_some(());
        self.shared.wait(&mut hub, Some(deadline), is_read);
        // What a thread of this process or a driver has in hand cannot be told to stop.
        self.shared.wait(&mut hub, None, |hub| (!hub.hub.outside.is_ending()).then_some(()));
        hub.finish();
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake_waiters(&mut hub);
        hub.wake();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            // The parent goes on with it: its thread is not here to be joined, and nothing that it shares is ended.
            let _thread = ManuallyDrop::new(self.thread.take());
            let _shared = ManuallyDrop::new(Arc::clone(&self.shared));
            return;
        }
        self.close();
        let is_itself = |thread: &JoinHandle<()>| thread.thread().id() == std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(|thread| !is_itself(thread)) {
            audit::takes_time("the end of a thread");
            // It does not panic; if it did, there is nothing left to end.
            let ended = thread.join();
            debug_assert!(ended.is_ok() || std::thread::panicking(), "the engine's thread panicked");
        }
    }
}

/// Whether all of it is device memory of this GPU, which may consist of several allocations.
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
