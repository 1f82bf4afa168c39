//! SIGHUP: the router reads its keys and its file again.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use kvlane_router::{
    members::{Membership, Reconfigured},
    shared::Keys,
};

use super::{args::RouteArgs, config, nodes, settings};
use crate::secret_file;

/// Keys of the file that take effect at a reload, beside [[node]] and [[dns]].
const AT_ONCE: [&str; 3] = ["api-key-file", "drain", "drain-delay"];

/// The settings that a running router can change.
#[derive(Debug)]
pub(super) struct Running {
    file: Option<PathBuf>,
    /// Keys of the file with the values that the router uses.
    values: BTreeMap<String, String>,
    /// Shared with the proxies.
    keys: Keys,
    key_file: Option<PathBuf>,
    /// The whole command line of kvlane, which the file's values complete.
    program: clap::Command,
    pub(super) times: Times,
}

/// Times that a router takes to stop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// The router still serves new connections for this time after SIGTERM.
    pub(super) delay: Duration,
    /// Requests may take this time after `delay`.
    pub(super) drain: Duration,
}

impl Times {
    fn of(args: &RouteArgs) -> Self {
        Self { delay: Duration::from_secs(args.drain_delay), drain: Duration::from_secs(args.drain) }
    }
}

impl Running {
    pub(super) fn new(
        args: &RouteArgs,
        values: BTreeMap<String, String>,
        keys: Keys,
        program: clap::Command,
    ) -> Self {
        Self {
            file: args.config.clone(),
            values,
            keys,
            key_file: args.api_key_file.clone(),
            program,
            times: Times::of(args),
        }
    }

    /// Reads everything again. If something cannot be read or is invalid, the router keeps its former configuration.
    pub(super) fn reload(&mut self, members: &mut Membership) {
        match self.try_reload(members) {
            // Log: after SIGHUP the router uses the keys, nodes and names of its file. Do: restart it for the
            // keys listed as counting after a restart only.
            Ok(done) => tracing::info!("configuration read again: {done}"),
            // Log: after SIGHUP the file or the keys could not be used; the router keeps its former
            // configuration. Do: correct what the error names, and send SIGHUP again.
            Err(error) => tracing::error!("configuration not read again, the former one stays: {error:#}"),
        }
    }

    fn try_reload(&mut self, members: &mut Membership) -> Result<String> {
        let Some(file) = &self.file else {
            let read = self
                .key_file
                .as_deref()
                .map(|file| secret_file::lines(settings::KEY_FILE, file))
                .transpose()?;
            return Ok(self.replace_keys(read.unwrap_or_default()));
        };
        let (args, tables) = config::read(file, &self.program)?;
        let new = settings::proxies(&args)?;
        if new.keys.is_empty() != self.keys.is_empty() {
            bail!("api-key-file: restart the router to serve clients with keys only, or without");
        }
        let values = tables.values.clone();
        let (nodes, names) = nodes::all(&args, tables)?;
        let changed =
            members.configure(nodes, names).with_context(|| format!("--config '{}'", file.display()))?;
        let mut done = self.replace_keys(new.keys.read().clone());
        if changed != Reconfigured::default() {
            let Reconfigured { nodes_named, nodes_dropped, names_added, names_dropped } = changed;
            done += &format!(
                "; {nodes_named} nodes are new or changed, {nodes_dropped} drain; {names_added} names are new, {names_dropped} gone"
            );
        }
        let differs = |key: &&String| self.values.get(*key) != values.get(*key);
        let both = self.values.keys().chain(values.keys().filter(|key| !self.values.contains_key(*key)));
        let late: Vec<&String> =
            both.filter(differs).filter(|key| !AT_ONCE.contains(&key.as_str())).collect();
        if !late.is_empty() {
            let names: Vec<&str> = late.iter().map(|key| key.as_str()).collect();
            done += &format!("; these count after a restart only: {}", names.join(", "));
        }
        // `values` stays what the router uses, so each SIGHUP names the keys that wait for a restart.
        for key in AT_ONCE {
            self.values.remove(key);
            self.values.extend(values.get_key_value(key).map(|(key, value)| (key.clone(), value.clone())));
        }
        (self.key_file, self.times) = (args.api_key_file.clone(), Times::of(&args));
        Ok(done)
    }

    fn replace_keys(&self, keys: Vec<String>) -> String {
        let done = format!("{} keys of clients", keys.len());
        self.keys.replace(keys);
        done
    }
}
