//! The table `[balance]` of the files of `kvlane route --config` and `kvlane replay --route`.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use kvlane_router::{
    balance::{BalanceSettings, NAMES, RoleSettings, Thresholds},
    webhook::WebhookUrl,
};
use serde::Deserialize;

/// A day: no time of the table is longer.
const MS_MAX: f64 = 86_400_000.0;

/// The table's keys. A missing key has its default.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct BalanceTable {
    every_ms: Option<f64>,
    window: Option<usize>,
    level_dwell_ms: Option<f64>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    step_tokens: Option<f64>,
    requests_max: Option<f64>,
    prefill_rate: Option<f64>,
    flips: Option<bool>,
    flip_after_ms: Option<f64>,
    flip_every_ms: Option<f64>,
    role_dwell_ms: Option<f64>,
    flips_at_once: Option<usize>,
    drains: Option<bool>,
    relief: Option<f64>,
    scale_up_after_ms: Option<f64>,
    scale_down_after_ms: Option<f64>,
    webhook: Option<String>,
    refuse_s: BTreeMap<String, f64>,
    prefill: RoleTable,
    decode: RoleTable,
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct RoleTable {
    high_enter: Option<f64>,
    high_exit: Option<f64>,
    low_enter: Option<f64>,
    low_exit: Option<f64>,
    weights: BTreeMap<String, f64>,
}

impl BalanceTable {
    /// The webhook that gets each change of roles, beside the log.
    pub(crate) fn webhook(&self) -> Result<Option<WebhookUrl>> {
        let parsed = self.webhook.as_ref().map(|url| url.parse::<WebhookUrl>());
        parsed.transpose().map_err(|error| anyhow!("balance.webhook: {error}"))
    }

    /// Classes of requests that the router refuses in an overload, with the time after which they may come again.
    pub(crate) fn refuse(&self) -> Result<Vec<(String, Duration)>> {
        let each = |(class, seconds): (&String, &f64)| {
            let wait = number(&format!("refuse-s.{class}"), Some(*seconds), 0.0, 1.0, 86_400.0)?;
            Ok((class.clone(), Duration::from_secs_f64(wait)))
        };
        self.refuse_s.iter().map(each).collect()
    }

    /// The settings, or an error that names the wrong key.
    pub(crate) fn settings(&self) -> Result<BalanceSettings> {
        let usual = BalanceSettings::default();
        Ok(BalanceSettings {
            every: time("every-ms", self.every_ms, usual.every, 10.0)?,
            window: match self.window {
                Some(window @ (0 | 10_001..)) => bail!("balance.window = {window}: from 1 to 10000 looks"),
                window => window.unwrap_or(usual.window),
            },
            level_dwell: time("level-dwell-ms", self.level_dwell_ms, usual.level_dwell, 0.0)?,
            ttft: time("ttft-ms", self.ttft_ms, usual.ttft, 1.0)?,
            tpot: time("tpot-ms", self.tpot_ms, usual.tpot, 0.1)?,
            step_tokens: number("step-tokens", self.step_tokens, usual.step_tokens, 1.0, 1e9)?,
            decodes: number("requests-max", self.requests_max, usual.decodes, 1.0, 1e9)?,
            prefill_rate: number("prefill-rate", self.prefill_rate, usual.prefill_rate, 1.0, 1e9)?,
            flips: self.flips.unwrap_or(usual.flips),
            flip_after: time("flip-after-ms", self.flip_after_ms, usual.flip_after, 0.0)?,
            flip_every: time("flip-every-ms", self.flip_every_ms, usual.flip_every, 0.0)?,
            role_dwell: time("role-dwell-ms", self.role_dwell_ms, usual.role_dwell, 0.0)?,
            flips_at_once: self.flips_at_once.unwrap_or(usual.flips_at_once),
            drains: self.drains.unwrap_or(usual.drains),
            relief: number("relief", self.relief, usual.relief, 0.0, 1000.0)?,
            scale_up_after: time("scale-up-after-ms", self.scale_up_after_ms, usual.scale_up_after, 0.0)?,
            scale_down_after: time(
                "scale-down-after-ms",
                self.scale_down_after_ms,
                usual.scale_down_after,
                0.0,
            )?,
            prefill: self.prefill.settings(usual.prefill).context("[balance.prefill]")?,
            decode: self.decode.settings(usual.decode).context("[balance.decode]")?,
        })
    }
}

impl RoleTable {
    fn settings(&self, usual: RoleSettings) -> Result<RoleSettings> {
        let mut weights = usual.weights;
        for (name, weight) in &self.weights {
            let Some(at) = NAMES.iter().position(|known| known == name) else {
                bail!("weights.{name}: there is no such indicator; there are {}", NAMES.join(", "));
            };
            if !(0.0..=1e6).contains(weight) {
                bail!("weights.{name} = {weight}: from 0 to 1000000");
            }
            weights[at] = *weight;
        }
        if weights.iter().sum::<f64>() <= 0.0 {
            bail!("weights: one at least has to be above 0");
        }
        let Thresholds { high_enter, high_exit, low_enter, low_exit } = usual.thresholds;
        let thresholds = Thresholds {
            high_enter: self.high_enter.unwrap_or(high_enter),
            high_exit: self.high_exit.unwrap_or(high_exit),
            low_enter: self.low_enter.unwrap_or(low_enter),
            low_exit: self.low_exit.unwrap_or(low_exit),
        };
        let Thresholds { high_enter, high_exit, low_enter, low_exit } = thresholds;
        let ordered = 0.0 <= low_enter && low_enter <= low_exit && low_exit <= high_exit;
        if !(ordered && high_exit <= high_enter && high_enter <= 2.0) {
            bail!(
                "low-enter = {low_enter}, low-exit = {low_exit}, high-exit = {high_exit}, high-enter = {high_enter}: they have \
                 to rise in this order, from 0 to 2"
            );
        }
        Ok(RoleSettings { weights, thresholds })
    }
}

fn time(key: &str, ms: Option<f64>, usual: Duration, least: f64) -> Result<Duration> {
    let ms = number(key, ms, usual.as_secs_f64() * 1e3, least, MS_MAX)?;
    Ok(Duration::from_secs_f64(ms / 1e3))
}

fn number(key: &str, value: Option<f64>, usual: f64, least: f64, most: f64) -> Result<f64> {
    let value = value.unwrap_or(usual);
    if !(least..=most).contains(&value) {
        bail!("balance.{key} = {value}: from {least} to {most}");
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<BalanceSettings> {
        let table = toml::from_str::<BalanceTable>(text)?;
        table.webhook()?;
        table.refuse()?;
        table.settings()
    }

    #[test]
    fn what_is_not_named_is_as_by_default() {
        assert_eq!(parsed("").unwrap(), BalanceSettings::default());
        let one = parsed("flips = false\n[decode]\nweights = { running = 7 }").unwrap();
        assert!(!one.flips);
        assert_eq!(one.decode.weights, [7.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn the_page_shows_the_defaults() {
        let page = include_str!("../../../docs/balance.md");
        let (_, from) = page.split_once("```toml\n[balance]\n").unwrap();
        let (table, _) = from.split_once("```").unwrap();
        let table = table.replace("[balance.", "[");
        assert!(table.contains("prefill-rate") && table.contains("[decode]"));
        assert_eq!(parsed(&table).unwrap(), BalanceSettings::default());
    }

    #[test]
    fn mistakes_are_told_with_their_key() {
        for (text, wanted) in [
            ("ttft-ms = -1", "balance.ttft-ms = -1: from 1 to"),
            ("ttft-ms = inf", "balance.ttft-ms = inf: from 1 to"),
            ("relief = nan", "balance.relief = NaN: from 0 to"),
            ("window = 0", "balance.window = 0: from 1 to 10000 looks"),
            ("requests-max = 0", "balance.requests-max = 0: from 1"),
            ("[prefill]\nhigh-exit = 0.5", "high-exit = 0.5, high-enter = 0.4: they have to rise"),
            ("[decode]\nhigh-enter = 3", "high-enter = 3: they have to rise"),
            ("[decode]\nlow-enter = nan", "low-enter = NaN"),
            (
                "[decode]\nweights = { speed = 1 }",
                "weights.speed: there is no such indicator; there are running",
            ),
            ("[decode]\nweights = { running = 0, waiting = 0, kv-cache = 0 }", "one at least"),
            ("speed = 1", "unknown field `speed`"),
            ("webhook = \"ftp://a\"", "balance.webhook: ftp://a is no address of a webhook"),
            ("[refuse-s]\nbatch = 0", "balance.refuse-s.batch = 0: from 1 to 86400"),
        ] {
            let told = format!("{:#}", parsed(text).unwrap_err());
            assert!(told.contains(wanted), "{text}: {told}");
        }
    }
}
