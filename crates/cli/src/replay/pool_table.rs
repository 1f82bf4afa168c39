//! `[[pool]]` of the file of `kvlane replay --route`.

use anyhow::{Context, Result, anyhow, bail};
use kvlane_fleet::PoolSetup;
use serde::Deserialize;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct PoolTable {
    name: String,
    tokens: Option<u64>,
    eviction: Option<String>,
    load_token_ms: Option<f64>,
    /// Whether the router learns which nodes share the pool.
    told: Option<bool>,
}

/// All pools. Fails if two have one name.
pub(super) fn pools(tables: Vec<PoolTable>) -> Result<Vec<PoolSetup>> {
    let mut pools: Vec<PoolSetup> = Vec::new();
    for table in tables {
        let place = || format!("[[pool]] {:?}", table.name);
        if pools.iter().any(|pool| pool.name == table.name) {
            bail!("{} is there twice", place());
        }
        let usual = PoolSetup::default();
        let eviction = table.eviction.as_ref().map_or(Ok(usual.eviction), |name| {
            name.parse().map_err(|error| anyhow!("eviction: {error}")).with_context(place)
        })?;
        let (tokens, load_token_ms) =
            (table.tokens.unwrap_or(usual.tokens), table.load_token_ms.unwrap_or(usual.load_token_ms));
        if tokens == 0 {
            bail!("{}: tokens = 0: at least 1", place());
        }
        if !(0.0..=60_000.0).contains(&load_token_ms) {
            bail!("{}: load-token-ms = {load_token_ms}: at least 0 and at most a minute", place());
        }
        pools.push(PoolSetup {
            name: table.name.clone(),
            tokens,
            eviction,
            load_token_ms,
            is_reported: table.told.unwrap_or(usual.is_reported),
        });
    }
    Ok(pools)
}
