//! The requests that a worker's link sends.

use bytes::{Bytes, BytesMut};
use kvlane_proto::{WIRE_MAX, WIRE_MIN, v1, v1::request::Body as Ask};

use super::{
    super::{flags::Flags, group},
    event::WorkerLinkOptions,
};
use crate::jobs::{LoadGroup, Release, SaveGroupSpec, SaveMethod};

pub(super) fn hello(options: &WorkerLinkOptions) -> Ask {
    Ask::Hello(v1::Hello {
        wire_min: WIRE_MIN,
        wire_max: WIRE_MAX,
        client: options.client.clone(),
        role: v1::hello::Role::Worker.into(),
        engine_id: options.engine_id.clone(),
        process_nonce: Bytes::copy_from_slice(&options.nonce),
        live_leases: Vec::new(),
    })
}

pub(super) fn register(options: &WorkerLinkOptions) -> Ask {
    let method = match options.save_method {
        SaveMethod::Auto => v1::register_worker::Method::Auto,
        SaveMethod::ProcessVm => v1::register_worker::Method::ProcessVm,
        SaveMethod::Mapped => v1::register_worker::Method::Mapped,
        SaveMethod::Gpu => v1::register_worker::Method::Gpu,
    };
    Ask::RegisterWorker(v1::RegisterWorker {
        rank: options.rank.0,
        workers: options.workers,
        groups: options.groups.iter().map(group::to_wire).collect(),
        fence_address: options.fence_address,
        method: method.into(),
        gpu: options.card.as_ref().map(|card| card.described.clone()),
    })
}

pub(super) fn save(groups: &[SaveGroupSpec], epoch: u64, event: Option<u32>, job: u64) -> Ask {
    Ask::Save(v1::Save { groups: groups.iter().map(save_group).collect(), epoch, event, job })
}

pub(super) fn claim(groups: &[SaveGroupSpec], job: u64) -> Ask {
    Ask::Claim(v1::Claim { groups: groups.iter().map(save_group).collect(), job })
}

pub(super) fn load(
    groups: &[LoadGroup],
    epoch: u64,
    event: Option<u32>,
    flags: Option<&Flags>,
    release: Release,
) -> Ask {
    let group = |group: &LoadGroup| v1::LoadGroup {
        group: group.group,
        block_ids: group.block_ids.iter().map(|id| id.0).collect(),
        pages: group.pages.iter().map(|page| page.0).collect(),
    };
    let flags = flags.map(|flags| v1::LoadFlags {
        address: flags.address,
        value: flags.value,
        region_ends: flags.ends_in_slices.clone(),
    });
    let beside_compute = release != Release::AtOnce;
    let groups = groups.iter().map(group).collect();
    Ask::Load(v1::Load { groups, epoch, event, flags, beside_compute })
}

fn save_group(group: &SaveGroupSpec) -> v1::SaveGroup {
    let mut hashes = BytesMut::with_capacity(group.hashes.len() * 16);
    group.hashes.iter().for_each(|hash| hashes.extend_from_slice(&hash.0));
    v1::SaveGroup {
        group: group.group,
        parent: group.parent.map_or_else(Bytes::new, |parent| Bytes::copy_from_slice(&parent.0)),
        hashes: hashes.freeze(),
        block_ids: group.block_ids.iter().map(|id| id.0).collect(),
    }
}
