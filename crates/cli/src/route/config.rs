//! The file of `kvlane route --config`: flags' values, and tables of engines.
//!
//! Flags' values become words of the command line, behind those that the user typed. So each key has the type, the limits and
//! the error of its flag.

use std::{collections::BTreeMap, env, ffi::OsString, fs, path::Path};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, parser::ValueSource};
use kvlane_router::{
    address::Address,
    members::{ConnectorAddress, DnsName, Spec},
    schedule::{Connector, Role},
};
use toml::{Table, Value};

use super::args::RouteArgs;
use crate::balance_table::BalanceTable;

/// Most data-parallel ranks of a server.
const RANKS_MAX: u32 = 1024;
/// Flags that name engines, and the table that takes their place in the file, because it has more fields.
const OF_TABLES: [(&str, &str); 6] = [
    ("worker", "[[node]]"),
    ("prefill", "[[node]]"),
    ("decode", "[[node]]"),
    ("worker-dns", "[[dns]]"),
    ("prefill-dns", "[[dns]]"),
    ("decode-dns", "[[dns]]"),
];

/// Engines, and names whose addresses are engines.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) nodes: Vec<Spec>,
    pub(super) names: Vec<DnsName>,
    /// How workers become prefill or decode nodes, if they do.
    pub(super) balance: Option<BalanceTable>,
    /// Other keys of the file with their values, without those that a flag or a variable overrides.
    pub(super) values: BTreeMap<String, String>,
}

/// Reads the file. Its values count only if neither a flag nor the environment sets them. `program` is the whole command line
/// of kvlane.
pub(super) fn read(file: &Path, program: &Command) -> Result<(RouteArgs, Tables)> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read --config '{}'", file.display()))?;
    let place = || format!("--config '{}'", file.display());
    let (words, tables) = {
        let given = program.clone().get_matches();
        let given = given.subcommand_matches("route").context("this is no `kvlane route`")?;
        parse(&text, given).with_context(place)?
    };
    let all = env::args_os().chain(words.into_iter().map(OsString::from));
    let matches = program
        .clone()
        .try_get_matches_from(all)
        .map_err(|error| anyhow!(sentence(&error)))
        .with_context(place)?;
    let matches = matches.subcommand_matches("route").context("this is no `kvlane route`")?;
    Ok((RouteArgs::from_arg_matches(matches)?, tables))
}

/// The words that the file adds to a command line, of which `given` are the flags that the user set.
fn parse(text: &str, given: &ArgMatches) -> Result<(Vec<String>, Tables)> {
    let mut table: Table = text.parse().map_err(|error: toml::de::Error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        anyhow!("line {}: {}", before.matches('\n').count() + 1, error.message().replace('\n', ", "))
    })?;
    let mut tables = Tables::default();
    for (number, table) in each_table(&mut table, "node")?.into_iter().enumerate() {
        let place = || format!("[[node]] number {}", number + 1);
        tables.nodes.extend(node(Keys::of(table, NODE_KEYS).with_context(place)?).with_context(place)?);
    }
    for (number, table) in each_table(&mut table, "dns")?.into_iter().enumerate() {
        let place = || format!("[[dns]] number {}", number + 1);
        tables.names.push(name(Keys::of(table, DNS_KEYS).with_context(place)?).with_context(place)?);
    }
    if let Some(value) = table.remove("balance") {
        tables.values.insert("balance".to_owned(), value.to_string());
        tables.balance = balance(value).context("[balance]")?;
    }
    let flags = RouteArgs::augment_args(Command::new("route"));
    let mut words = Vec::new();
    for (key, value) in table {
        let of_key = words_of(&flags, &key, &value, given)?;
        if !of_key.is_empty() {
            tables.values.insert(key, value.to_string());
        }
        words.extend(of_key);
    }
    Ok((words, tables))
}

fn words_of(flags: &Command, key: &str, value: &Value, given: &ArgMatches) -> Result<Vec<String>> {
    if let Some((_, table)) = OF_TABLES.iter().find(|(name, _)| *name == key) {
        bail!(
            "{key}: in a file engines are {table} tables, with role = \"worker\", \"prefill\" or \"decode\""
        );
    }
    let is_key = |name: &&str| !matches!(*name, "config" | "help");
    let keys: Vec<(&str, &Arg)> =
        flags.get_arguments().filter_map(|arg| Some((arg.get_long().filter(is_key)?, arg))).collect();
    let Some((_, arg)) = keys.iter().find(|(name, _)| *name == key) else {
        let names = keys.iter().map(|(name, _)| *name);
        let names: Vec<&str> = names.filter(|name| OF_TABLES.iter().all(|of| of.0 != *name)).collect();
        bail!("{key} = {value}: there is no such key; there are node, dns, {}", names.join(", "));
    };
    let values = match value {
        Value::Array(values) if matches!(arg.get_action(), clap::ArgAction::Append) => values.clone(),
        value => vec![value.clone()],
    };
    let is_switch = matches!(arg.get_action(), clap::ArgAction::SetTrue);
    let word = |value: &Value| match value {
        Value::Boolean(is_on) if is_switch => Ok(is_on.then(|| format!("--{key}"))),
        Value::String(text) => Ok(Some(format!("--{key}={text}"))),
        Value::Integer(number) => Ok(Some(format!("--{key}={number}"))),
        Value::Float(number) => Ok(Some(format!("--{key}={number}"))),
        other => {
            Err(anyhow!("{key} = {other}: a text or a number is allowed here, and no {}", other.type_str()))
        }
    };
    let words = values.iter().filter_map(|value| word(value).transpose()).collect::<Result<Vec<_>>>()?;
    // Parsed even if a flag overrides the key. So a mistake shows now, and not once the flag is left out.
    let line = std::iter::once("route").chain(words.iter().map(String::as_str));
    flags
        .clone()
        .try_get_matches_from(line)
        .map_err(|error| anyhow!("{key} = {value}: {}", sentence(&error)))?;
    let is_given = matches!(
        given.value_source(arg.get_id().as_str()),
        Some(ValueSource::CommandLine | ValueSource::EnvVariable)
    );
    Ok(if is_given { Vec::new() } else { words })
}

/// clap's error without its advice on flags.
fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().take_while(|line| !line.trim().is_empty());
    let lines: Vec<&str> = lines.map(|line| line.trim().trim_start_matches("error: ")).collect();
    lines.join(" ")
}

const NODE_KEYS: &[&str] =
    &["url", "role", "group", "class", "host", "pool", "ranks", "connector", "zmq", "handoff"];
const DNS_KEYS: &[&str] = &["name", "role", "group", "class", "host", "pool", "ranks", "connector"];

fn each_table(table: &mut Table, key: &str) -> Result<Vec<Table>> {
    let Some(value) = table.remove(key) else { return Ok(Vec::new()) };
    let tables: Option<Vec<Table>> = match value {
        Value::Array(values) => values.into_iter().map(|value| value.try_into().ok()).collect(),
        _ => None,
    };
    tables.ok_or_else(|| anyhow!("{key} has to be tables: write [[{key}]]"))
}

/// Reads and checks `[balance]` here, so that a mistake shows with the file's name.
fn balance(value: Value) -> Result<Option<BalanceTable>> {
    if let Value::Boolean(is_on) = value {
        return Ok(is_on.then(BalanceTable::default));
    }
    let table: BalanceTable = value
        .try_into()
        .map_err(|error: toml::de::Error| anyhow!("{}", error.message().replace('\n', ", ")))?;
    table.settings()?;
    table.webhook()?;
    table.refuse()?;
    Ok(Some(table))
}

/// One engine for each rank.
fn node(mut keys: Keys) -> Result<Vec<Spec>> {
    let address: Address = keys.needed("url")?;
    let ranks = keys.ranks()?;
    let spec = keys.spec(address.clone())?;
    if ranks > 0 && address.rank.is_some() {
        bail!("url = \"{address}\" names one rank, and ranks = {ranks} of them: give one of both");
    }
    Ok(match ranks {
        0 => vec![spec],
        ranks => (0..ranks).map(|rank| Spec { address: address.with_rank(rank), ..spec.clone() }).collect(),
    })
}

fn name(mut keys: Keys) -> Result<DnsName> {
    let address: Address = keys.needed("name")?;
    if address.rank.is_some() || !address.path.is_empty() {
        bail!("name = \"{address}\": write \"HOST:PORT\"");
    }
    Ok(DnsName { ranks: keys.ranks()?, like: keys.spec(address)? })
}

/// The keys of one table.
struct Keys(Table);

impl Keys {
    fn of(table: Table, allowed: &[&str]) -> Result<Self> {
        if let Some((key, value)) = table.iter().find(|(key, _)| !allowed.contains(&key.as_str())) {
            bail!("{key} = {value}: there is no such key; there are {}", allowed.join(", "));
        }
        Ok(Self(table))
    }

    fn given<T: std::str::FromStr<Err: std::fmt::Display>>(&mut self, key: &str) -> Result<Option<T>> {
        let Some(value) = self.0.remove(key) else { return Ok(None) };
        let Value::String(text) = &value else { bail!("{key} = {value}: it has to be a text in quotes") };
        text.parse().map(Some).map_err(|error| anyhow!("{key} = {value}: {error}"))
    }

    fn needed<T: std::str::FromStr<Err: std::fmt::Display>>(&mut self, key: &str) -> Result<T> {
        self.given(key)?.ok_or_else(|| anyhow!("{key} is missing"))
    }

    fn ranks(&mut self) -> Result<u32> {
        match self.0.remove("ranks") {
            None => Ok(0),
            Some(Value::Integer(ranks @ 1..)) if ranks <= RANKS_MAX.into() => Ok(ranks as u32),
            Some(other) => bail!("ranks = {other}: it has to be a number from 1 to {RANKS_MAX}"),
        }
    }

    fn spec(mut self, address: Address) -> Result<Spec> {
        let role: Role = self.needed("role")?;
        let connector: Option<Connector> = self.given("connector")?;
        let zmq: Option<ConnectorAddress> = self.given("zmq")?;
        if zmq.is_some() && connector != Some(Connector::P2pNccl) {
            bail!("zmq is of nodes with connector = \"p2p-nccl\" only");
        }
        let handoff: Option<ConnectorAddress> = self.given("handoff")?;
        if handoff.is_some() && connector != Some(Connector::Direct) {
            bail!("handoff is of nodes with connector = \"direct\" only");
        }
        let group = self.given::<String>("group")?.unwrap_or_default().into();
        let class = self.given::<String>("class")?.unwrap_or_default().into();
        let host = self.given::<String>("host")?.map(Into::into);
        let pool: Option<String> = self.given("pool")?;
        if pool.as_deref() == Some("") {
            bail!("pool = \"\": the name is empty");
        }
        Ok(Spec {
            address,
            role,
            group,
            class,
            host,
            connector,
            connector_address: zmq.or(handoff).map(|address| address.0),
            pool: pool.map(Into::into),
        })
    }
}
