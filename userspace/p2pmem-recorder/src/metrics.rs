// SPDX-License-Identifier: MIT OR Apache-2.0

//! The state of a storage node as metrics for Prometheus.
//!
//! Counters belong to NICs and channels, not to sessions: sessions end and are forgotten, and their numbers would be a label
//! with unbounded values. The counters of a NIC exist from the start, so that Prometheus sees the first increase. Those of a
//! channel exist from its first session until the channel is deleted.

use std::fmt::Error;
use std::sync::Arc;

use anyhow::{Context, Result};
use p2pmem_exporter::http::Server;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::node::Node;
use crate::status::{Counters, Direction, Drive, Limit, Lun, MemoryKind, Session, Status, Totals};
use crate::store::ChannelName;

/// Serves the metrics of a node until it is dropped.
#[derive(Debug)]
pub struct Metrics {
    server: Server,
}

impl Metrics {
    /// Serves the metrics of `node` at an address with a port, on a thread of its own. `nics` are the names of its NICs.
    ///
    /// # Errors
    ///
    /// The address is not available, or no thread can be created.
    pub fn serve(node: Arc<Node>, nics: Vec<String>, address: &str) -> Result<Self> {
        let server = Server::bind(address).context("serving metrics")?;
        let serving = server.clone();
        let scrape = move || render(node.status(), node.totals(), &nics);
        std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || serving.serve(scrape))
            .context("starting the thread of the metrics")?;
        Ok(Self { server })
    }

    /// Returns the address of the metrics.
    pub fn url(&self) -> String {
        self.server.url()
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        // The thread is not joined: it may wait for a client that does not read its answer.
        self.server.stop();
    }
}

/// Returns all metrics as OpenMetrics text.
///
/// # Errors
///
/// The metrics cannot be encoded.
pub fn render(status: Status, totals: Totals, nics: &[String]) -> std::result::Result<String, Error> {
    let mut registry = Registry::with_prefix("p2pmem_recorder");
    registry.register_collector(Box::new(Snapshot::new(status, totals, nics)));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// A value of [`Counters`]: name, help text, unit, direction, and value.
struct BlockCounter(
    &'static str,
    &'static str,
    Option<Unit>,
    Direction,
    fn(&Counters) -> u64,
);

const BLOCK_COUNTERS: &[BlockCounter] = &[
    BlockCounter(
        "received_blocks",
        "Blocks that arrived to be recorded",
        None,
        Direction::Record,
        |c| c.blocks,
    ),
    BlockCounter(
        "received",
        "Bytes of blocks that arrived to be recorded",
        Some(Unit::Bytes),
        Direction::Record,
        |c| c.bytes,
    ),
    BlockCounter(
        "acknowledged_blocks",
        "Blocks that are durable on the drives",
        None,
        Direction::Record,
        |c| c.acknowledged,
    ),
    BlockCounter(
        "acknowledged",
        "Bytes of blocks that are durable on the drives",
        Some(Unit::Bytes),
        Direction::Record,
        |c| c.acknowledged_bytes,
    ),
    BlockCounter(
        "dropped_blocks",
        "Blocks that arrived, and were not durable when their session ended",
        None,
        Direction::Record,
        |c| c.dropped,
    ),
    BlockCounter(
        "dropped",
        "Bytes of blocks that arrived, and were not durable when their session ended",
        Some(Unit::Bytes),
        Direction::Record,
        |c| c.dropped_bytes,
    ),
    BlockCounter(
        "played_blocks",
        "Blocks that accelerator nodes have read",
        None,
        Direction::Play,
        |c| c.blocks,
    ),
    BlockCounter(
        "played",
        "Bytes of blocks that accelerator nodes have read",
        Some(Unit::Bytes),
        Direction::Play,
        |c| c.bytes,
    ),
];

/// A value of a drive or a LUN: name, help text, unit, and value.
struct Value<T>(&'static str, &'static str, Option<Unit>, fn(&T) -> u64);

const DRIVE_GAUGES: &[Value<Drive>] = &[
    Value(
        "drive_size",
        "Bytes of the drive's file system",
        Some(Unit::Bytes),
        |d| d.size,
    ),
    Value(
        "drive_free",
        "Bytes of the drive's file system that are free for LUNs",
        Some(Unit::Bytes),
        |d| d.free,
    ),
    Value("drive_requests", "Reads and writes in progress", None, |d| d.in_flight),
];

const DRIVE_COUNTERS: &[Value<Drive>] = &[
    Value(
        "drive_written",
        "Bytes that the drive has written since the machine started",
        Some(Unit::Bytes),
        |d| d.written,
    ),
    Value(
        "drive_read",
        "Bytes that the drive has read since the machine started",
        Some(Unit::Bytes),
        |d| d.read,
    ),
    Value(
        "drive_errors",
        "Errors of the drive since the program started",
        None,
        |d| d.errors,
    ),
];

const LUN_GAUGES: &[Value<Lun>] = &[
    Value("lun_size", "Bytes of all segments", Some(Unit::Bytes), |l| l.total),
    Value("lun_free", "Bytes of the free segments", Some(Unit::Bytes), |l| l.free),
];

const LIMITS: [Limit; 3] = [Limit::Peer, Limit::Drive, Limit::Rate];

/// Labels: names and values.
type Labels = Vec<(&'static str, String)>;

/// Returns a label. The encoder writes values as they are, so this escapes characters that are not allowed in a value: names
/// of folders have any characters.
fn label(name: &'static str, value: &str) -> (&'static str, String) {
    let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
    (name, value)
}

fn of_nic(nic: &str) -> Labels {
    vec![label("nic", nic)]
}

fn of_channel(name: &ChannelName) -> Labels {
    vec![
        label("lun", &name.lun),
        label("stream", &name.stream),
        label("channel", &name.channel.to_string()),
    ]
}

fn of_drive(drive: &Drive) -> Labels {
    vec![label("drive", &drive.folder.display().to_string())]
}

fn of_session(session: &Session) -> Labels {
    let mut labels = of_channel(&ChannelName::new(&session.lun, &session.stream, session.channel));
    labels.push(label("direction", direction(session.direction)));
    labels.push(label("nic", &session.nic));
    labels
}

fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::Record => "record",
        Direction::Play => "play",
    }
}

fn limit(limit: Limit) -> &'static str {
    match limit {
        Limit::Peer => "peer",
        Limit::Drive => "drive",
        Limit::Rate => "rate",
    }
}

/// Everything that a scrape reports.
#[derive(Debug)]
struct Snapshot {
    status: Status,
    totals: Totals,
}

impl Snapshot {
    fn new(status: Status, mut totals: Totals, nics: &[String]) -> Self {
        for nic in nics {
            for direction in [Direction::Record, Direction::Play] {
                totals.nics.entry((direction, nic.clone())).or_default();
            }
        }
        let exists = |name: &ChannelName| {
            let lun = status.luns.iter().find(|lun| lun.name == name.lun);
            let stream = lun.and_then(|lun| lun.streams.iter().find(|stream| stream.name == name.stream));
            stream.is_some_and(|stream| (name.channel as usize) < stream.channels.len())
        };
        totals.channels.retain(|(_, name), _| exists(name));
        Self { status, totals }
    }

    fn running(&self) -> impl Iterator<Item = &Session> {
        self.status.sessions.iter().filter(|session| session.running)
    }

    /// Returns a value of the running sessions, summed over sessions with the same labels: several play the same channel.
    fn of_sessions(&self, value: impl Fn(&Session) -> u64) -> Vec<(Labels, u64)> {
        let mut sums: Vec<(Labels, u64)> = Vec::new();
        for session in self.running() {
            let labels = of_session(session);
            match sums.iter_mut().find(|(other, _)| *other == labels) {
                Some((_, sum)) => *sum += value(session),
                None => sums.push((labels, value(session))),
            }
        }
        sums
    }
}

type Encoded = std::result::Result<(), Error>;
type Samples = Vec<(Labels, u64)>;

/// Writes a metric with one value for each set of labels. `metric` makes a metric of a value.
fn metrics<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    metric: impl Fn(u64) -> M,
    (name, help, unit): (&str, &str, Option<&Unit>),
    samples: Samples,
) -> Encoded {
    let mut family = encoder.encode_descriptor(name, help, unit, metric(0).metric_type())?;
    for (labels, value) in samples {
        metric(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// Writes a metric that can decrease, with one value for each set of labels.
fn gauges(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    samples: Samples,
) -> Encoded {
    metrics(encoder, ConstGauge::new, (name, help, unit), samples)
}

/// Writes a counter with one value for each set of labels.
fn counters(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    samples: Samples,
) -> Encoded {
    metrics(encoder, ConstCounter::new, (name, help, unit), samples)
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        let encoder = &mut encoder;
        self.encode_node(encoder)?;
        self.encode_sessions(encoder)?;
        self.encode_blocks(encoder)?;
        self.encode_store(encoder)
    }
}

impl Snapshot {
    fn encode_node(&self, encoder: &mut DescriptorEncoder<'_>) -> Encoded {
        let memory = match self.status.memory {
            MemoryKind::Device => "device",
            MemoryKind::Host => "host",
        };
        let about = vec![
            label("name", &self.status.name),
            label("version", self.status.version),
            label("memory", memory),
        ];
        gauges(encoder, "node", "The storage node", None, vec![(about, 1)])?;
        let problems = ConstGauge::new(self.status.problems.len() as u64);
        let help = "Problems that the store could not repair when it was opened";
        problems.encode(encoder.encode_descriptor("problems", help, None, problems.metric_type())?)
    }

    fn encode_sessions(&self, encoder: &mut DescriptorEncoder<'_>) -> Encoded {
        let per_nic = |value: &dyn Fn(&Direction, &str, &Counters) -> u64| -> Samples {
            let sample = |((way, nic), counters): (&(Direction, String), &Counters)| {
                let labels = vec![label("nic", nic), label("direction", direction(*way))];
                (labels, value(way, nic, counters))
            };
            self.totals.nics.iter().map(sample).collect()
        };
        let running = |way: &Direction, nic: &str, _: &Counters| {
            self.running()
                .filter(|session| session.direction == *way && session.nic == nic)
                .count() as u64
        };
        gauges(encoder, "sessions", "Sessions that run", None, per_nic(&running))?;
        let began = per_nic(&|_, _, counters| counters.sessions);
        counters(encoder, "sessions_started", "Sessions that began", None, began)?;
        let failed = per_nic(&|_, _, counters| counters.failed);
        let help = "Sessions that ended with an error, without those that an administrator stopped";
        counters(encoder, "sessions_failed", help, None, failed)?;

        let buffers = self.of_sessions(|session| session.buffers.into());
        gauges(encoder, "session_buffers", "Buffers of running sessions", None, buffers)?;
        let waiting = self.of_sessions(|session| session.in_flight.into());
        let help = "Buffers of running sessions that wait for the drives";
        gauges(encoder, "session_waiting_buffers", help, None, waiting)?;
        let limited = LIMITS.iter().flat_map(|which| {
            let samples = self.of_sessions(|session| u64::from(session.limit == *which));
            samples.into_iter().map(|(mut labels, value)| {
                labels.push(label("limit", limit(*which)));
                (labels, value)
            })
        });
        let help = "Running sessions whose rate the limit determines: the accelerator node (peer), the drives (drive), or the \
                    requested rate (rate)";
        gauges(encoder, "session_limit", help, None, limited.collect())
    }

    fn encode_blocks(&self, encoder: &mut DescriptorEncoder<'_>) -> Encoded {
        for BlockCounter(name, help, unit, way, value) in BLOCK_COUNTERS {
            let nics = self.totals.nics.iter().filter(|((direction, _), _)| direction == way);
            let samples = nics.map(|((_, nic), counters)| (of_nic(nic), value(counters)));
            let help_of_nic = format!("{help}, by NIC");
            counters(
                encoder,
                &format!("nic_{name}"),
                &help_of_nic,
                unit.as_ref(),
                samples.collect(),
            )?;
            let channels = self
                .totals
                .channels
                .iter()
                .filter(|((direction, _), _)| direction == way);
            let samples = channels.map(|((_, channel), counters)| (of_channel(channel), value(counters)));
            let help = format!("{help}, by channel that had a session");
            counters(
                encoder,
                &format!("channel_{name}"),
                &help,
                unit.as_ref(),
                samples.collect(),
            )?;
        }
        Ok(())
    }

    fn encode_store(&self, encoder: &mut DescriptorEncoder<'_>) -> Encoded {
        let drives = &self.status.drives;
        let about = drives.iter().map(|drive| {
            let mut labels = of_drive(drive);
            labels.push(label("device", drive.device.as_deref().unwrap_or_default()));
            (labels, 1)
        });
        gauges(encoder, "drive", "The block device of a drive", None, about.collect())?;
        for Value(name, help, unit, value) in DRIVE_GAUGES {
            let samples = drives.iter().map(|drive| (of_drive(drive), value(drive)));
            gauges(encoder, name, help, unit.as_ref(), samples.collect())?;
        }
        for Value(name, help, unit, value) in DRIVE_COUNTERS {
            let samples = drives.iter().map(|drive| (of_drive(drive), value(drive)));
            counters(encoder, name, help, unit.as_ref(), samples.collect())?;
        }
        for Value(name, help, unit, value) in LUN_GAUGES {
            let samples = self
                .status
                .luns
                .iter()
                .map(|lun| (vec![label("lun", &lun.name)], value(lun)));
            gauges(encoder, name, help, unit.as_ref(), samples.collect())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;
    use crate::node::{NodeOptions, SessionHandle, SessionOptions};
    use crate::status::SessionDevices;
    use crate::store::{LunOptions, StreamOptions};

    fn node(folder: &tempfile::TempDir) -> Arc<Node> {
        let mut options = NodeOptions::new("a \"node\"", [folder.path()]);
        options.cached = true;
        let node = Node::open(options).unwrap();
        let lun = LunOptions::new([folder.path()]).segment_size(1 << 20).segments(4);
        node.create_lun("fast", &lun).unwrap();
        let stream = StreamOptions::new(64 << 10).channels(2);
        node.create_stream("fast", "radar", &stream).unwrap();
        node
    }

    fn session(node: &Node, direction: Direction, nic: &str) -> SessionHandle {
        node.begin_session(SessionOptions {
            direction,
            channel: ChannelName::new("fast", "radar", 1),
            recording: 0,
            peer: "peer".into(),
            nic: nic.into(),
            memory: "host memory".into(),
            devices: SessionDevices::default(),
            block_size: 65536,
            buffers: 8,
        })
    }

    fn scrape(node: &Node) -> String {
        render(node.status(), node.totals(), &["mlx5_0".into(), "mlx5_1".into()]).unwrap()
    }

    /// Returns the value of a metric, by its name with labels.
    fn value(text: &str, name: &str) -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")))?;
        line.rsplit_once(' ')?.1.parse().ok()
    }

    fn check(text: &str, expected: &[(&str, Option<u64>)]) {
        for (name, expected) in expected {
            let name = format!("p2pmem_recorder_{name}");
            assert_eq!(value(text, &name), *expected, "{name}\n{text}");
        }
    }

    #[test]
    fn blocks_are_counted_by_nic_and_channel_also_after_sessions() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        check(
            &scrape(&node),
            &[
                ("nic_received_blocks_total{nic=\"mlx5_0\"}", Some(0)),
                ("nic_dropped_blocks_total{nic=\"mlx5_1\"}", Some(0)),
                ("nic_played_blocks_total{nic=\"mlx5_1\"}", Some(0)),
                ("sessions_failed_total{nic=\"mlx5_0\",direction=\"record\"}", Some(0)),
                (
                    "channel_received_blocks_total{lun=\"fast\",stream=\"radar\",channel=\"1\"}",
                    None,
                ),
            ],
        );
        let recording = session(&node, Direction::Record, "mlx5_0");
        for _ in 0..3 {
            recording.arrived();
        }
        recording.acknowledged(2);
        recording.progress(1, Limit::Drive);
        let players = [(); 2].map(|()| session(&node, Direction::Play, "mlx5_1"));
        for player in &players {
            player.arrived();
            player.acknowledged(1);
            player.progress(3, Limit::Peer);
        }
        let of = "lun=\"fast\",stream=\"radar\",channel=\"1\"";
        let (record, play) = (
            format!("{of},direction=\"record\",nic=\"mlx5_0\""),
            format!("{of},direction=\"play\",nic=\"mlx5_1\""),
        );
        let text = scrape(&node);
        check(
            &text,
            &[
                ("nic_received_blocks_total{nic=\"mlx5_0\"}", Some(3)),
                ("nic_received_bytes_total{nic=\"mlx5_0\"}", Some(3 * 65536)),
                ("nic_acknowledged_blocks_total{nic=\"mlx5_0\"}", Some(2)),
                ("nic_dropped_blocks_total{nic=\"mlx5_0\"}", Some(0)),
                ("nic_played_blocks_total{nic=\"mlx5_1\"}", Some(2)),
                ("nic_played_blocks_total{nic=\"mlx5_0\"}", Some(0)),
                (&format!("channel_acknowledged_bytes_total{{{of}}}"), Some(2 * 65536)),
                (&format!("channel_played_blocks_total{{{of}}}"), Some(2)),
                ("sessions{nic=\"mlx5_1\",direction=\"play\"}", Some(2)),
                ("sessions_started_total{nic=\"mlx5_1\",direction=\"play\"}", Some(2)),
                (&format!("session_buffers{{{play}}}"), Some(16)),
                (&format!("session_waiting_buffers{{{record}}}"), Some(1)),
                (&format!("session_waiting_buffers{{{play}}}"), Some(6)),
                (&format!("session_limit{{{record},limit=\"drive\"}}"), Some(1)),
                (&format!("session_limit{{{record},limit=\"peer\"}}"), Some(0)),
                (&format!("session_limit{{{play},limit=\"peer\"}}"), Some(2)),
            ],
        );
        recording.failed("the NIC failed");
        drop((recording, players));
        check(
            &scrape(&node),
            &[
                ("nic_received_blocks_total{nic=\"mlx5_0\"}", Some(3)),
                ("nic_dropped_blocks_total{nic=\"mlx5_0\"}", Some(1)),
                ("nic_dropped_bytes_total{nic=\"mlx5_0\"}", Some(65536)),
                ("sessions{nic=\"mlx5_0\",direction=\"record\"}", Some(0)),
                ("sessions_failed_total{nic=\"mlx5_0\",direction=\"record\"}", Some(1)),
                ("sessions_failed_total{nic=\"mlx5_1\",direction=\"play\"}", Some(0)),
                (&format!("session_buffers{{{play}}}"), None),
            ],
        );
        // The counters of a deleted channel are gone, and those of its NIC stay.
        node.delete_stream("fast", "radar").unwrap();
        check(
            &scrape(&node),
            &[
                (&format!("channel_received_blocks_total{{{of}}}"), None),
                ("nic_received_blocks_total{nic=\"mlx5_0\"}", Some(3)),
            ],
        );
    }

    #[test]
    fn drives_and_luns_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let node = node(&folder);
        let failing = session(&node, Direction::Record, "mlx5_0");
        let error = std::io::Error::from_raw_os_error(5);
        node.drive_failed(&failing, folder.path(), &error, "the recording ends");
        let drive = format!("{{drive=\"{}\"}}", folder.path().display());
        let text = scrape(&node);
        check(
            &text,
            &[
                ("lun_size_bytes{lun=\"fast\"}", Some(4 << 20)),
                ("lun_free_bytes{lun=\"fast\"}", Some(4 << 20)),
                (&format!("drive_errors_total{drive}"), Some(1)),
                ("problems", Some(0)),
            ],
        );
        assert!(value(&text, &format!("p2pmem_recorder_drive_free_bytes{drive}")).unwrap() > 0);
        assert!(text.contains(r#"p2pmem_recorder_node{name="a \"node\"","#), "{text}");
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn labels_are_escaped() {
        assert_eq!(label("drive", "a\\b\"c\nd").1, r#"a\\b\"c\nd"#);
    }

    #[test]
    fn the_alert_rules_use_metrics_that_exist() {
        let folder = tempfile::tempdir().unwrap();
        let text = scrape(&node(&folder));
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../p2pmem-exporter/alerts.yml");
        let alerts = std::fs::read_to_string(path).unwrap();
        let is_part = |c: char| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit();
        let names = alerts
            .split(|c: char| !is_part(c))
            .filter(|word| word.starts_with("p2pmem_recorder_"));
        let used: BTreeSet<_> = names.collect();
        assert!(used.len() > 4, "{used:?}");
        for name in used {
            let has = |line: &str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
            assert!(text.lines().any(has), "{name} is not a metric:\n{text}");
        }
    }

    #[test]
    fn metrics_are_served_until_they_are_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = Metrics::serve(node(&folder), vec!["mlx5_0".into()], "127.0.0.1:0").unwrap();
        let url = metrics.url();
        let address = url.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(
            text.contains("p2pmem_recorder_nic_received_blocks_total{nic=\"mlx5_0\"} 0"),
            "{text}"
        );
        drop(metrics);
    }
}
