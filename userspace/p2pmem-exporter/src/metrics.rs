// SPDX-License-Identifier: MIT OR Apache-2.0

//! The module's state as metrics.
//!
//! The exporter counts nothing: each scrape reads the module's counters, which start at 0 when the module is loaded.

use p2pmem::rules::{RuleState, Rules, Usage};
use p2pmem::{Device, Info, Provider, ProviderState, Stats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

/// State of the module during a scrape.
#[derive(Debug)]
struct Snapshot {
    info: Info,
    /// Sums over all providers since the module was loaded.
    all: Stats,
    /// The current providers and their counters.
    providers: Vec<(Provider, Stats)>,
}

impl Snapshot {
    fn take(device: &Device) -> p2pmem::Result<Self> {
        Ok(Self {
            info: device.info()?,
            all: device.stats(None)?,
            providers: device.provider_stats()?,
        })
    }
}

/// A metric with one value per provider: name, help text, unit, and value.
struct Gauge(&'static str, &'static str, Option<Unit>, fn(&Provider) -> u64);

const GAUGES: &[Gauge] = &[
    Gauge(
        "size",
        "Memory available for buffers when all is free",
        Some(Unit::Bytes),
        |p| p.size,
    ),
    Gauge("free", "Free memory", Some(Unit::Bytes), |p| p.free),
    Gauge("largest", "Largest contiguous free memory", Some(Unit::Bytes), |p| {
        p.largest
    }),
    Gauge(
        "kernel_reserve",
        "Kernel reserve: memory that stays in the kernel's pool for other drivers",
        Some(Unit::Bytes),
        |p| p.kernel_reserve,
    ),
    Gauge(
        "pinned",
        "Freed memory whose pages still have references",
        Some(Unit::Bytes),
        |p| p.pinned,
    ),
    Gauge(
        "scrubbing",
        "Freed memory that is not cleared yet",
        Some(Unit::Bytes),
        |p| p.scrubbing,
    ),
    Gauge("buffers", "Live buffers", None, |p| p.buffers.into()),
    Gauge("dma_bufs", "Open dma-bufs", None, |p| p.exports.into()),
    Gauge("revoking", "Whether the provider is being removed", None, |p| {
        (p.state == ProviderState::Revoking).into()
    }),
];

/// A metric with one value per rule that has this value: name, help text, and value.
struct RuleGauge(&'static str, &'static str, fn(&RuleState) -> Option<u64>);

const RULE_GAUGES: &[RuleGauge] = &[
    RuleGauge("quota", "Bytes that each user may hold", |state| state.rule.quota),
    RuleGauge(
        "largest_user",
        "Bytes of the user who holds most under the quota",
        |state| {
            state.rule.quota?;
            let users = state.usage.iter().filter_map(|usage| match usage {
                Usage::User { bytes, .. } => Some(*bytes),
                _ => None,
            });
            Some(users.max().unwrap_or(0))
        },
    ),
    RuleGauge("group_quota", "Bytes that the users may hold together", |state| {
        state.rule.group_quota
    }),
    RuleGauge(
        "group",
        "Bytes that the users hold together under the group quota",
        |state| {
            state.rule.group_quota?;
            let group = state.usage.iter().find_map(|usage| match usage {
                Usage::Group { bytes } => Some(*bytes),
                _ => None,
            });
            Some(group.unwrap_or(0))
        },
    ),
];

/// A counter per provider, and its sum: name, help text, unit, and value.
struct Counter(&'static str, &'static str, Option<Unit>, fn(&Stats) -> u64);

const COUNTERS: &[Counter] = &[
    Counter("allocs", "Buffers allocated", None, |s| s.allocs),
    Counter("frees", "Buffers freed", None, |s| s.frees),
    Counter("refused", "Requests that were refused", None, |s| s.failed),
    Counter("allocated", "Bytes of buffers allocated", Some(Unit::Bytes), |s| {
        s.alloc_bytes
    }),
    Counter("freed", "Bytes of buffers freed", Some(Unit::Bytes), |s| s.free_bytes),
    Counter("maps", "User mappings created", None, |s| s.maps),
    Counter("scrubbed", "Bytes cleared between owners", Some(Unit::Bytes), |s| {
        s.scrubbed_bytes
    }),
    Counter(
        "pinned_buffers",
        "Freed buffers whose pages still had references",
        None,
        |s| s.pinned,
    ),
    Counter("revoked", "Buffers revoked", None, |s| s.revoked),
    Counter("exports", "Dma-bufs exported", None, |s| s.exports),
    Counter("attaches", "Importers attached to dma-bufs", None, |s| s.attaches),
    Counter("attaches_refused", "Importers that were refused", None, |s| {
        s.attach_failed
    }),
];

/// Labels of a value of a provider.
#[derive(Clone, Debug, EncodeLabelSet)]
struct ProviderLabels {
    provider: u32,
    function: String,
}

/// Label of a value of a rule.
#[derive(Clone, Debug, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
}

/// Labels that describe a provider.
#[derive(Clone, Debug, EncodeLabelSet)]
struct ProviderInfo {
    provider: u32,
    function: String,
    kind: String,
    mode: &'static str,
    driver: String,
    numa_node: String,
}

/// Label with the module's version.
#[derive(Clone, Debug, EncodeLabelSet)]
struct ModuleInfo {
    version: String,
    abi: u32,
}

impl ProviderLabels {
    fn provider(provider: &Provider) -> Self {
        Self {
            provider: provider.id,
            function: provider.addr.to_string(),
        }
    }
}

type Encoded = Result<(), std::fmt::Error>;

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, unit: Option<&Unit>, value: u64) -> Encoded {
    let gauge = ConstGauge::new(value);
    gauge.encode(encoder.encode_descriptor(name, help, unit, gauge.metric_type())?)
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        let Self { info, all, providers } = self;
        let one = ConstGauge::new(1_u64);
        let mut family = encoder.encode_descriptor("module", "The loaded module", None, one.metric_type())?;
        let version = ModuleInfo {
            version: info.version.clone(),
            abi: info.abi_version,
        };
        one.encode(family.encode_family(&version)?)?;
        gauge(
            &mut encoder,
            "providers",
            "Number of providers",
            None,
            info.providers.into(),
        )?;

        let mut family = encoder.encode_descriptor("provider", "Properties of a provider", None, one.metric_type())?;
        for (provider, _) in providers {
            let about = ProviderInfo {
                provider: provider.id,
                function: provider.addr.to_string(),
                kind: provider.kind.to_string(),
                mode: if provider.pageless { "pageless" } else { "paged" },
                driver: provider.driver.clone().unwrap_or_default(),
                numa_node: provider.numa_node.map(|n| n.to_string()).unwrap_or_default(),
            };
            one.encode(family.encode_family(&about)?)?;
        }
        for Gauge(name, help, unit, value) in GAUGES {
            let name = format!("provider_{name}");
            let mut family = encoder.encode_descriptor(&name, help, unit.as_ref(), one.metric_type())?;
            for (provider, _) in providers {
                ConstGauge::new(value(provider)).encode(family.encode_family(&ProviderLabels::provider(provider))?)?;
            }
        }
        for Counter(name, help, unit, value) in COUNTERS {
            let counter = ConstCounter::new(value(all));
            let whole = format!("{help}, sum over all providers since the module was loaded");
            counter.encode(encoder.encode_descriptor(name, &whole, unit.as_ref(), counter.metric_type())?)?;
            let name = format!("provider_{name}");
            let mut family = encoder.encode_descriptor(&name, help, unit.as_ref(), counter.metric_type())?;
            for (provider, stats) in providers {
                ConstCounter::new(value(stats)).encode(family.encode_family(&ProviderLabels::provider(provider))?)?;
            }
        }
        Ok(())
    }
}

/// The rules in force during a scrape.
#[derive(Debug)]
struct RulesInForce(Vec<RuleState>);

impl Collector for RulesInForce {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        let count = u64::try_from(self.0.len()).unwrap_or(u64::MAX);
        gauge(&mut encoder, "rules", "Number of rules in force", None, count)?;
        for RuleGauge(name, help, value) in RULE_GAUGES {
            let name = format!("rule_{name}");
            let kind = ConstGauge::new(0_u64).metric_type();
            let mut family = encoder.encode_descriptor(&name, help, Some(&Unit::Bytes), kind)?;
            for state in &self.0 {
                let Some(value) = value(state) else { continue };
                let labels = RuleLabels {
                    rule: state.rule.name.clone(),
                };
                ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

/// The metric that shows whether the module is available. Always present.
#[derive(Debug)]
struct Up(bool);

impl Collector for Up {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        gauge(
            &mut encoder,
            "up",
            "Whether the module is available",
            None,
            self.0.into(),
        )
    }
}

/// Returns all metrics as OpenMetrics text, and the error if the module is not available. The metrics of rules are absent
/// if the rules cannot be read.
///
/// # Errors
///
/// The metrics cannot be encoded.
pub fn render(
    open: impl FnOnce() -> p2pmem::Result<Device>,
    rules: &Rules,
) -> Result<(String, Option<p2pmem::Error>), std::fmt::Error> {
    let mut registry = Registry::with_prefix("p2pmem");
    let taken = open().and_then(|device| Snapshot::take(&device));
    registry.register_collector(Box::new(Up(taken.is_ok())));
    let error = match taken {
        Ok(snapshot) => {
            registry.register_collector(Box::new(snapshot));
            if let Ok(mut all) = rules.list() {
                all.retain(|state| state.rule.enabled);
                registry.register_collector(Box::new(RulesInForce(all)));
            }
            None
        }
        Err(error) => Some(error),
    };
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok((text, error))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use p2pmem::fake::{write_rule, Fake};
    use p2pmem::Request;

    use super::*;

    /// Returns the value of a metric, by its name with labels.
    fn value(text: &str, name: &str) -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")))?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    fn no_rules() -> Rules {
        Rules::with_root("/nonexistent")
    }

    #[test]
    fn the_module_s_counters_are_reported() {
        let fake = Fake::example();
        let device = fake.device();
        let buffer = device.alloc(&Request::new(1 << 20).provider(1)).unwrap();
        assert!(device.alloc(&Request::new(1 << 40)).is_err());
        let (text, error) = render(|| Ok(fake.device()), &no_rules()).unwrap();
        assert!(error.is_none());
        assert_eq!(value(&text, "p2pmem_up"), Some(1));
        assert_eq!(value(&text, "p2pmem_providers"), Some(3));
        let of = "{provider=\"1\",function=\"0000:03:00.0\"}";
        let stats = device.stats(Some(1)).unwrap();
        for (name, expected) in [
            ("size_bytes", 256 << 20),
            ("free_bytes", 255 << 20),
            ("buffers", 1),
            ("allocs_total", 1),
            ("allocated_bytes_total", 1 << 20),
            ("refused_total", stats.failed),
        ] {
            assert_eq!(
                value(&text, &format!("p2pmem_provider_{name}{of}")),
                Some(expected),
                "{name}\n{text}"
            );
        }
        assert_eq!(value(&text, "p2pmem_allocs_total"), Some(1));
        assert_eq!(
            value(&text, "p2pmem_refused_total"),
            Some(device.stats(None).unwrap().failed)
        );
        assert!(text.ends_with("# EOF\n"));
        drop(buffer);
        let (text, _) = render(|| Ok(fake.device()), &no_rules()).unwrap();
        assert_eq!(value(&text, &format!("p2pmem_provider_buffers{of}")), Some(0));
        assert_eq!(value(&text, "p2pmem_frees_total"), Some(1));
    }

    #[test]
    fn removed_provider_counts_only_in_totals() {
        let fake = Fake::example();
        let device = fake.device();
        drop(device.alloc(&Request::new(4096).provider(2)).unwrap());
        fake.remove_provider(2);
        let (text, _) = render(|| Ok(fake.device()), &no_rules()).unwrap();
        assert_eq!(value(&text, "p2pmem_allocs_total"), Some(1));
        assert!(!text.contains("provider=\"2\""), "{text}");
    }

    #[test]
    fn without_the_module_up_is_0() {
        let (text, error) = render(|| Device::open_path("/nonexistent"), &no_rules()).unwrap();
        assert_eq!(value(&text, "p2pmem_up"), Some(0));
        assert!(error.is_some() && text.ends_with("# EOF\n") && !text.contains("p2pmem_providers"));
    }

    #[test]
    fn quotas_and_what_counts_under_them_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let usage = "uid 1000 4096\nuid 1001 8192\ngroup 12288";
        let shared = [("quota", "16384"), ("group_quota", "65536"), ("usage", usage)];
        write_rule(dir.path(), "10-shared", &shared).unwrap();
        write_rule(dir.path(), "20-unused", &[("quota", "0")]).unwrap();
        write_rule(dir.path(), "30-off", &[("quota", "1"), ("enable", "0")]).unwrap();
        write_rule(dir.path(), "40-deny", &[("action", "deny")]).unwrap();
        let fake = Fake::example();
        let (text, _) = render(|| Ok(fake.device()), &Rules::with_root(dir.path())).unwrap();
        assert_eq!(value(&text, "p2pmem_rules"), Some(3));
        for (name, rule, expected) in [
            ("quota", "10-shared", Some(16384)),
            ("largest_user", "10-shared", Some(8192)),
            ("group_quota", "10-shared", Some(65536)),
            ("group", "10-shared", Some(12288)),
            ("quota", "20-unused", Some(0)),
            ("largest_user", "20-unused", Some(0)),
            ("group", "20-unused", None),
            ("quota", "30-off", None),
            ("quota", "40-deny", None),
            ("largest_user", "40-deny", None),
        ] {
            let metric = format!("p2pmem_rule_{name}_bytes{{rule=\"{rule}\"}}");
            assert_eq!(value(&text, &metric), expected, "{metric}\n{text}");
        }
        let (text, error) = render(|| Ok(fake.device()), &no_rules()).unwrap();
        assert!(error.is_none() && !text.contains("p2pmem_rule"), "{text}");
    }

    #[test]
    fn the_alert_rules_use_metrics_that_exist() {
        let dir = tempfile::tempdir().unwrap();
        write_rule(dir.path(), "10-lab", &[("quota", "1"), ("group_quota", "1")]).unwrap();
        let fake = Fake::example();
        let (text, _) = render(|| Ok(fake.device()), &Rules::with_root(dir.path())).unwrap();
        let alerts = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/alerts.yml")).unwrap();
        let is_part = |c: char| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit();
        // The recorder has a test for its own metrics.
        let names = alerts
            .split(|c: char| !is_part(c))
            .filter(|word| word.starts_with("p2pmem_") && !word.starts_with("p2pmem_recorder_"));
        let used: BTreeSet<_> = names.collect();
        assert!(used.len() > 8, "{used:?}");
        for name in used {
            let has = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
            assert!(text.lines().any(has), "{name} is not a metric:\n{text}");
        }
    }

    #[test]
    fn metric_names_are_valid_and_unique() {
        let rules = RULE_GAUGES.iter().map(|g| g.0);
        let all = GAUGES
            .iter()
            .map(|g| g.0)
            .chain(COUNTERS.iter().map(|c| c.0))
            .chain(rules);
        let unique: BTreeSet<_> = all.collect();
        assert_eq!(unique.len(), GAUGES.len() + COUNTERS.len() + RULE_GAUGES.len());
        assert!(unique
            .iter()
            .all(|name| name.bytes().all(|c| c == b'_' || c.is_ascii_lowercase())));
    }
}
