//! The engines that flags and the file name.

use anyhow::{Result, bail};
use kvlane_router::{
    address::Address,
    members::{DnsName, Spec},
    schedule::Role,
};

use super::{args::RouteArgs, config::Tables};

/// All engines of the flags and the file, and all names whose addresses are engines.
pub(super) fn all(args: &RouteArgs, tables: Tables) -> Result<(Vec<Spec>, Vec<DnsName>)> {
    let Tables { nodes: mut specs, names: mut dns, balance: _, values: _ } = tables;
    let by_role = |worker: &[Address], prefill: &[Address], decode: &[Address]| {
        let all = [(Role::Worker, worker), (Role::Prefill, prefill), (Role::Decode, decode)];
        let specs = all.into_iter().flat_map(|(role, addresses)| {
            addresses.iter().map(move |address| Spec::new(address.clone(), role)).collect::<Vec<_>>()
        });
        specs.collect::<Vec<_>>()
    };
    specs.extend(by_role(&args.worker, &args.prefill, &args.decode));
    let names = by_role(&args.worker_dns, &args.prefill_dns, &args.decode_dns);
    dns.extend(names.into_iter().map(|like| DnsName { like, ranks: 0 }));
    if args.ping.is_none() && dns.is_empty() {
        check(&specs)?;
    }
    Ok((specs, dns))
}

/// Checks that the engines can serve together. Called only if no name or ping brings others later.
fn check(specs: &[Spec]) -> Result<()> {
    let has = |role| specs.iter().any(|spec| spec.role == role);
    match (has(Role::Worker), has(Role::Prefill), has(Role::Decode)) {
        (false, false, false) => bail!(
            "no engine is named: give at least one --worker, or --prefill and --decode; or --worker-dns, --ping or --config, by \
             which engines are found"
        ),
        (_, true, false) => bail!(ALONE.replace("GIVEN", "prefill").replace("MISSING", "decode")),
        (_, false, true) => bail!(ALONE.replace("GIVEN", "decode").replace("MISSING", "prefill")),
        _ => Ok(()),
    }
}

const ALONE: &str = "--GIVEN without --MISSING: engines of both kinds work together; one that serves whole requests is a --worker";

/// The number of engines of each role, for the log.
pub(super) fn counts(specs: &[Spec]) -> String {
    let count = |role| specs.iter().filter(|spec| spec.role == role).count();
    format!(
        "{} workers, {} prefill and {} decode engines",
        count(Role::Worker),
        count(Role::Prefill),
        count(Role::Decode)
    )
}
