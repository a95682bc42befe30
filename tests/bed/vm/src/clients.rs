// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tables of programs that other projects wrote: what to run on which node, and the expected result.
//!
//! A [`Table`] is a TOML file in `tests/suites/clients`. An entry with `each` stands for one client for every
//! combination of the values of its variables; its texts name the variables in braces. Documentation/testbed/clients.md
//! describes the format.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, fs};

use anyhow::{Context, Result, bail, ensure};
use p2pmem_guest::wire::Listen;
use regex::Regex;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use crate::command::{Command, Outcome, Status};
use crate::counters::UNKNOWN;

/// The node of the client, or of a command without a server.
pub const CLIENT: &str = "a";
/// The node of the server.
pub const SERVER: &str = "b";

/// Returns the folder of the tables, relative to this crate's sources.
pub fn tables() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../suites/clients")
}

/// The clients of a file.
#[derive(Debug)]
pub struct Table {
    /// The name of the file, without `.toml`.
    pub name: String,
    /// The topology that the clients need.
    pub topology: String,
    /// The kernels on which the clients run.
    pub kernels: Kernels,
    /// A shell script that runs on every node before the first client.
    pub set_up: Option<String>,
    /// The clients, in the order of the file.
    pub clients: Vec<Client>,
}

/// The kernels on which the clients of a table run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kernels {
    /// On the stock kernel and on the debug kernel.
    Both,
    /// On the stock kernel only, with the reason.
    Stock(String),
    /// On the debug kernel only, with the reason.
    Debug(String),
}

/// One client.
#[derive(Debug, Clone, PartialEq)]
pub struct Client {
    /// The name, unique in its table.
    pub name: String,
    /// The shell command on [`SERVER`], and the port on which it listens.
    pub server: Option<(String, Listen)>,
    /// The shell command on [`CLIENT`].
    pub client: String,
    /// The expected result.
    pub expected: Expected,
    /// The time limit.
    pub limit: Duration,
    /// Whether the next client needs fresh guests.
    pub ruins: bool,
    /// The reason why the client does not run.
    pub skip: Option<String>,
    /// The reason why the client runs only in a long run.
    pub long_only: Option<String>,
    /// The reason why the client runs on the debug kernel only in a long run.
    pub debug_long_only: Option<String>,
}

/// The expected result of a client: it ends with an exit code, its output has certain texts, and the counters are within bounds.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// The client's exit code.
    pub exit: i32,
    /// Texts that its output must have.
    pub says: Vec<String>,
    /// Whether the server must also end by itself, with success.
    pub server_ends: bool,
    /// Conditions on the counters of the devices during the run.
    pub evidence: Vec<Condition>,
    /// The reason for a failure, if one is expected.
    pub why: Option<String>,
}

/// A bound on a counter: `b.nic0.payload.host_written < 64K`. `+` adds counters.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    text: String,
    counters: Vec<Vec<String>>,
    operator: Operator,
    bound: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Less,
    AtMost,
    Equal,
    AtLeast,
    More,
}

/// A row of the report: a client on a kernel.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The kernel: `stock` or `debug`.
    pub kernel: String,
    /// The name of the table.
    pub table: String,
    /// The name of the client.
    pub client: String,
    /// The command.
    pub command: String,
    /// The expected result.
    pub expected: String,
    /// The results, or the reason why there are none.
    #[serde(flatten)]
    pub results: Results,
}

/// The results of a client.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Results {
    /// Of all attempts, in their order: a client that exceeds a time limit runs again.
    Attempts(Vec<Attempt>),
    /// The client did not run.
    NotRun(NotRun),
}

/// The result of one attempt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Attempt {
    /// Whether the result is the expected one.
    pub ok: bool,
    /// The result.
    pub got: String,
    /// The duration in seconds.
    pub seconds: f64,
    /// The conditions on counters, each with the counted value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
}

/// The reason why a client did not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotRun {
    /// The run's filter excludes the client, or no change since the last full run can affect it.
    NotSelected,
    /// The client has passed on this tree, in an earlier run.
    PassedBefore,
    /// The time for tests was over.
    NotStarted,
    /// The client does not run on this kernel or in this kind of run.
    Skipped(String),
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotRun::NotSelected => f.write_str("not_selected"),
            NotRun::PassedBefore => f.write_str("passed_before"),
            NotRun::NotStarted => f.write_str("not_started"),
            NotRun::Skipped(reason) => write!(f, "skipped: {reason}"),
        }
    }
}

impl Serialize for NotRun {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The rows of all clients of all kernels.
#[derive(Debug, Default)]
pub struct Reports(Vec<Report>);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableText {
    topology: String,
    stock_only: Option<String>,
    debug_only: Option<String>,
    set_up: Option<String>,
    client: Vec<ClientText>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ClientText {
    name: String,
    #[serde(default)]
    each: BTreeMap<String, Vec<String>>,
    server: Option<String>,
    listen: Option<ListenText>,
    client: String,
    #[serde(default)]
    exit: i32,
    #[serde(default)]
    says: Vec<String>,
    #[serde(default)]
    evidence: Vec<String>,
    server_ends: Option<bool>,
    why: Option<String>,
    skip: Option<String>,
    #[serde(default = "limit")]
    limit: u64,
    #[serde(default)]
    ruins: bool,
    long_only: Option<String>,
    debug_long_only: Option<String>,
}

/// A TCP port as a number, or a port of rdma_cm as `"rdma:7174"`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum ListenText {
    Tcp(u16),
    Rdma(String),
}

/// Returns the default time limit of a client in seconds. An idle machine needs less than a minute.
fn limit() -> u64 {
    150
}

impl Table {
    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or an entry is wrong: the error names the entry and the reason.
    pub fn load(path: &Path) -> Result<Table> {
        let name = path.file_stem().context("a table without a name")?.to_string_lossy();
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Table::parse(&name, &text).with_context(|| path.display().to_string())
    }

    /// Reads and checks a text.
    ///
    /// # Errors
    ///
    /// Those of [`Table::load`].
    pub fn parse(name: &str, text: &str) -> Result<Table> {
        let text: TableText = toml::from_str(text)?;
        let kernels = match (text.stock_only, text.debug_only) {
            (None, None) => Kernels::Both,
            (Some(why), None) => Kernels::Stock(why),
            (None, Some(why)) => Kernels::Debug(why),
            (Some(_), Some(_)) => bail!("stock_only and debug_only exclude both kernels"),
        };
        let mut clients: Vec<Client> = Vec::new();
        for entry in text.client {
            let what = format!("client {:?}", entry.name);
            for entry in combinations(entry) {
                let client = Client::new(entry).with_context(|| what.clone())?;
                ensure!(
                    clients.iter().all(|other| other.name != client.name),
                    "there are two clients {:?}",
                    client.name
                );
                clients.push(client);
            }
        }
        Ok(Table {
            name: name.to_owned(),
            topology: text.topology,
            kernels,
            set_up: text.set_up,
            clients,
        })
    }
}

/// Returns one entry for each combination of the variables of an entry, with their values filled in.
fn combinations(mut entry: ClientText) -> Vec<ClientText> {
    let Some((variable, values)) = entry.each.pop_first() else {
        return vec![entry];
    };
    let place = format!("{{{variable}}}");
    let filled = values.iter().map(|value| {
        let fill = |text: &String| text.replace(&place, value);
        ClientText {
            name: fill(&entry.name),
            server: entry.server.as_ref().map(fill),
            client: fill(&entry.client),
            says: entry.says.iter().map(fill).collect(),
            evidence: entry.evidence.iter().map(fill).collect(),
            ..entry.clone()
        }
    });
    filled.flat_map(combinations).collect()
}

impl Client {
    fn new(text: ClientText) -> Result<Client> {
        let server = match (text.server, text.listen) {
            (None, None) => None,
            (Some(server), Some(ListenText::Tcp(port))) => Some((server, Listen::Tcp(port))),
            (Some(server), Some(ListenText::Rdma(port))) => {
                let port = port.strip_prefix("rdma:").and_then(|port| port.parse().ok());
                let port = port.context("listen is a TCP port, or \"rdma:PORT\"")?;
                Some((server, Listen::Rdma(port)))
            }
            (Some(_), None) => bail!("a server needs listen"),
            (None, Some(_)) => bail!("nobody listens without a server"),
        };
        for pattern in &text.says {
            Regex::new(pattern).with_context(|| format!("says {pattern:?}"))?;
        }
        ensure!(text.exit == 0 || text.why.is_some(), "one that is to fail needs a why");
        let expected = Expected {
            exit: text.exit,
            says: text.says,
            server_ends: text.server_ends.unwrap_or(text.exit == 0),
            evidence: text
                .evidence
                .iter()
                .map(|text| Condition::parse(text))
                .collect::<Result<_>>()?,
            why: text.why,
        };
        Ok(Client {
            name: text.name,
            server,
            client: text.client,
            expected,
            limit: Duration::from_secs(text.limit),
            ruins: text.ruins,
            skip: text.skip,
            long_only: text.long_only,
            debug_long_only: text.debug_long_only,
        })
    }

    /// Returns why the client does not run, in a long run or in a short one, on the debug kernel or on the stock kernel.
    pub fn skipped(&self, long: bool, debug: bool) -> Option<String> {
        let on_debug = self.debug_long_only.as_ref().filter(|_| debug);
        let in_short_run = self.long_only.as_ref().or(on_debug).filter(|_| !long);
        let only_long = in_short_run.map(|reason| format!("only in a long run: {reason}"));
        self.skip.clone().or(only_long)
    }

    /// Returns the command for [`CLIENT`].
    pub fn client_command(&self) -> Command {
        Command::new(["bash", "-c", self.client.as_str()]).limit(self.limit)
    }

    /// Returns the command for [`SERVER`].
    pub fn server_command(&self) -> Option<Command> {
        let (script, listen) = self.server.as_ref()?;
        // The client's time limit starts when the server listens.
        let limit = self.limit * 2;
        Some(
            Command::new(["bash", "-c", script.as_str()])
                .limit(limit)
                .listen(*listen),
        )
    }

    /// Returns whether a command names an environment variable.
    pub fn names(&self, variable: &str) -> bool {
        let server = self.server.as_ref().map(|(script, _)| script);
        server
            .into_iter()
            .chain([&self.client])
            .any(|text| text.contains(variable))
    }

    /// Returns whether the server must end by itself.
    pub fn server_ends(&self) -> bool {
        self.expected.server_ends
    }

    /// Returns the row of the client with these results, without the names of kernel and table.
    pub fn report(&self, results: Results) -> Report {
        Report {
            kernel: String::new(),
            table: String::new(),
            client: self.name.clone(),
            command: match &self.server {
                Some((server, _)) => format!("{SERVER}: {server}\n{CLIENT}: {}", self.client),
                None => self.client.clone(),
            },
            expected: match &self.expected.why {
                Some(why) => format!("exit {}: {why}", self.expected.exit),
                None => "pass".into(),
            },
            results,
        }
    }

    /// Compares the outcomes with the expected result. `counted` has the counts of all devices during the run: see
    /// [`crate::cluster::Cluster::snapshot`].
    pub fn judge(&self, server: Option<&Outcome>, client: Option<&Outcome>, counted: &Value) -> Attempt {
        let mut wrong = Vec::new();
        let mut evidence = Vec::new();
        let mut got = client.map_or_else(|| "the server did not listen".to_owned(), end);
        let expected = &self.expected;
        let output = client.map(output).unwrap_or_default();
        if client.is_none_or(|client| client.status != (Status::Exited { code: expected.exit })) {
            wrong.push(last_words(&output, 4));
        }
        for pattern in &expected.says {
            if !Regex::new(pattern).is_ok_and(|regex| regex.is_match(&output)) {
                wrong.push(format!("it does not say {pattern:?}: {}", last_words(&output, 40)));
            }
        }
        let bad_end = |server: &&Outcome| expected.server_ends && server.status != (Status::Exited { code: 0 });
        if let Some(server) = server.filter(bad_end) {
            wrong.push(format!(
                "the server: {}; {}",
                end(server),
                last_words(&self::output(server), 4)
            ));
        }
        let logs = [server, client].into_iter().flatten();
        wrong.extend(
            logs.flat_map(|outcome| &outcome.findings)
                .map(|line| format!("kernel: {line}")),
        );
        for condition in &expected.evidence {
            match condition.value(counted) {
                Ok(value) => {
                    evidence.push(format!("{}: {value}", condition.text));
                    if !condition.holds(value) {
                        wrong.push(format!("not {}: {value}", condition.text));
                    }
                }
                Err(e) => wrong.push(format!("{}: {e:#}", condition.text)),
            }
        }
        for wrong in &wrong {
            got.push_str("; ");
            got.push_str(wrong);
        }
        Attempt {
            ok: wrong.is_empty(),
            got,
            seconds: client.map_or(0.0, |client| client.seconds),
            evidence,
        }
    }
}

impl Report {
    /// Returns the fields that identify the row. One client of pyverbs has a row for each test.
    fn identity(&self) -> [&str; 4] {
        [&self.kernel, &self.table, &self.client, &self.command]
    }
}

impl Attempt {
    /// Returns the result of an attempt that failed because of an error of the guests or of the harness.
    pub fn prevented(error: &str) -> Attempt {
        Attempt {
            ok: false,
            got: format!("not run: {error}"),
            seconds: 0.0,
            evidence: Vec::new(),
        }
    }
}

impl Reports {
    /// Adds a row. If there is a row of this client, the new attempts follow the earlier ones. A reason why the client
    /// did not run replaces an earlier reason, and no attempts.
    pub fn add(&mut self, report: Report) {
        let Some(row) = self.0.iter_mut().find(|row| row.identity() == report.identity()) else {
            self.0.push(report);
            return;
        };
        match (&mut row.results, report.results) {
            (Results::Attempts(attempts), Results::Attempts(new)) => attempts.extend(new),
            (Results::Attempts(_), Results::NotRun(_)) => {}
            (results, new) => *results = new,
        }
    }

    /// Sets the reason why a client of a table did not run on a kernel, unless the client has attempts.
    ///
    /// # Errors
    ///
    /// The client has no row.
    pub fn not_run(&mut self, kernel: &str, table: &str, client: &str, reason: &NotRun) -> Result<()> {
        let rows = self.0.iter_mut();
        let rows = rows.filter(|row| row.kernel == kernel && row.table == table && row.client == client);
        let mut count = 0;
        for row in rows {
            count += 1;
            if let Results::NotRun(earlier) = &mut row.results {
                *earlier = reason.clone();
            }
        }
        ensure!(count > 0, "no client {client:?} of {table:?} on the {kernel} kernel");
        Ok(())
    }

    /// Returns all rows.
    pub fn rows(&self) -> &[Report] {
        &self.0
    }
}

fn end(outcome: &Outcome) -> String {
    match &outcome.status {
        Status::Exited { code: 0 } => "pass".into(),
        Status::Exited { code } => format!("exit {code}"),
        other => format!("{other:?}"),
    }
}

fn output(outcome: &Outcome) -> String {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    text(&outcome.stdout) + &text(&outcome.stderr)
}

/// Returns at most `most` lines from the end of an output, without empty ones, as one line.
fn last_words(output: &str, most: usize) -> String {
    let lines = output.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let mut last: Vec<&str> = lines.take(most).collect();
    last.reverse();
    last.join(" | ")
}

/// Returns the bytes of a device's payload whose target is unknown: a drive counts them by itself. For a NIC they are
/// the bytes outside of all memory that its process has mapped, which QEMU moved by messages.
fn unknown(counters: &Value) -> u64 {
    let payload = &counters["payload"];
    let names = [UNKNOWN, "message_read", "message_written"];
    names.iter().filter_map(|name| payload[name].as_u64()).sum()
}

impl Condition {
    fn parse(text: &str) -> Result<Condition> {
        let usage = || format!("evidence {text:?}: write it like \"b.nic0.payload.host_written < 64K\"");
        let words: Vec<&str> = text.split_ascii_whitespace().collect();
        let [sum @ .., operator, bound] = words.as_slice() else {
            bail!(usage())
        };
        let counters = sum.iter().filter(|word| **word != "+");
        let counters: Vec<Vec<String>> = counters
            .map(|word| word.split('.').map(str::to_owned).collect())
            .collect();
        ensure!(
            !counters.is_empty() && counters.iter().all(|path| path.len() >= 3),
            usage()
        );
        let operator = match *operator {
            "<" => Operator::Less,
            "<=" => Operator::AtMost,
            "==" => Operator::Equal,
            ">=" => Operator::AtLeast,
            ">" => Operator::More,
            _ => bail!(usage()),
        };
        let bound = parse_size::Config::new().with_binary().parse_size(bound);
        Ok(Condition {
            text: text.to_owned(),
            counters,
            operator,
            bound: bound.with_context(usage)?,
        })
    }

    fn value(&self, counted: &Value) -> Result<u64> {
        let mut sum = 0;
        for path in &self.counters {
            let [node, device, rest @ ..] = path.as_slice() else {
                bail!("no device")
            };
            let device = &counted[node][device];
            // The counters of a device process are below `counters`; those that the runner counts for a drive are not.
            let mut value = device.get("counters").unwrap_or(device);
            let unknown = unknown(value);
            ensure!(
                unknown == 0,
                "{}: {unknown} bytes moved from or to unknown addresses: nothing can be said of the others",
                path.join(".")
            );
            for word in rest {
                value = &value[word];
            }
            sum += value
                .as_u64()
                .with_context(|| format!("{} is not counted", path.join(".")))?;
        }
        Ok(sum)
    }

    fn holds(&self, value: u64) -> bool {
        match self.operator {
            Operator::Less => value < self.bound,
            Operator::AtMost => value <= self.bound,
            Operator::Equal => value == self.bound,
            Operator::AtLeast => value >= self.bound,
            Operator::More => value > self.bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const TABLE: &str = r#"
        topology = "rdma"
        set_up = "true"
        [[client]]
        name = "ib_{verb}_{kind}"
        each = { verb = ["write", "read"], kind = ["bw", "lat"] }
        listen = 18515
        server = "ib_{verb}_{kind}"
        client = "ib_{verb}_{kind} $P2PMEM_ADDR_B"
        says = ["^x"]
        evidence = ["b.nic0.payload.host_written + b.nic0.payload.host_read <= 64K"]
        [[client]]
        name = "rping"
        listen = "rdma:7174"
        server = "rping -s"
        client = "rping -c"
        exit = 3
        why = "it cannot"
        [[client]]
        name = "other"
        client = "other"
        skip = "no such hardware"
        [[client]]
        name = "slow"
        client = "slow"
        long_only = "it is slow"
        [[client]]
        name = "slow on debug"
        client = "slow"
        debug_long_only = "it is slow there"
    "#;

    fn outcome(code: i32, stdout: &str) -> Outcome {
        Outcome {
            status: Status::Exited { code },
            stdout: stdout.as_bytes().to_vec(),
            stderr: Vec::new(),
            dmesg: Vec::new(),
            findings: Vec::new(),
            seconds: 1.0,
        }
    }

    #[test]
    fn entry_expands_to_all_combinations() {
        let table = Table::parse("t", TABLE).unwrap();
        let names: Vec<&str> = table.clients.iter().map(|client| client.name.as_str()).collect();
        let all = [
            "ib_write_bw",
            "ib_read_bw",
            "ib_write_lat",
            "ib_read_lat",
            "rping",
            "other",
            "slow",
            "slow on debug",
        ];
        assert_eq!(names.len(), all.len());
        assert!(all.iter().all(|name| names.contains(name)), "{names:?}");
        assert_eq!(
            table.clients[0].server,
            Some(("ib_write_bw".into(), Listen::Tcp(18515)))
        );
        assert_eq!(table.clients[4].server, Some(("rping -s".into(), Listen::Rdma(7174))));
        assert_eq!(
            table.clients[4].server_command().unwrap().limit,
            Duration::from_secs(300)
        );
        assert!(table.clients[5].server_command().is_none());
    }

    #[test]
    fn client_names_the_variables_of_both_commands() {
        let table = Table::parse("t", TABLE).unwrap();
        assert!(table.clients[0].names("$P2PMEM_ADDR_B") && !table.clients[0].names("$P2PMEM_ADDR_A"));
        let text = r#"
            topology = "rdma"
            [[client]]
            name = "one"
            listen = 1
            server = "$A/x"
            client = "$B/x"
        "#;
        let one = &Table::parse("t", text).unwrap().clients[0];
        assert!(one.names("$A") && one.names("$B") && !one.names("$C"));
    }

    #[test]
    fn tables_select_kernels() {
        let kernels = |line: &str| Table::parse("t", &format!("{line}\n{TABLE}")).unwrap().kernels;
        assert_eq!(kernels(""), Kernels::Both);
        assert_eq!(kernels("stock_only = \"a\""), Kernels::Stock("a".into()));
        assert_eq!(kernels("debug_only = \"b\""), Kernels::Debug("b".into()));
    }

    #[test]
    fn invalid_tables_are_rejected() {
        let cases = [
            (
                "listen = 18515",
                "",
                "client \"ib_{verb}_{kind}\": a server needs listen",
            ),
            ("\"rdma:7174\"", "\"cm:7174\"", "listen is"),
            ("why = \"it cannot\"", "", "needs a why"),
            ("\"^x\"", "\"(\"", "says \"(\""),
            ("<= 64K", "~ 64K", "write it like"),
            ("<= 64K", "<= many", "write it like"),
            ("b.nic0.payload.host_written + ", "host_written + ", "write it like"),
            (
                "name = \"other\"",
                "name = \"rping\"",
                "there are two clients \"rping\"",
            ),
            ("skip = ", "jump = ", "jump"),
            (
                "set_up = ",
                "stock_only = \"a\"\ndebug_only = \"b\"\nset_up = ",
                "exclude both kernels",
            ),
        ];
        for (from, to, expected) in cases {
            let text = TABLE.replacen(from, to, 1);
            assert_ne!(text, TABLE);
            let error = format!("{:#}", Table::parse("t", &text).expect_err("accepted"));
            assert!(error.contains(expected), "{expected:?} not in {error:?}");
        }
    }

    #[test]
    fn attempts_reflect_the_outcome() {
        let table = Table::parse("t", TABLE).unwrap();
        let counted =
            |bytes: u64| json!({"b": {"nic0": {"counters": {"payload": {"host_written": bytes, "host_read": 1}}}}});
        let bw = &table.clients[0];
        let good = bw.judge(Some(&outcome(0, "")), Some(&outcome(0, "x")), &counted(100));
        assert!(good.ok && good.got == "pass", "{good:?}");
        assert!(good.evidence[0].ends_with("64K: 101"), "{good:?}");
        for (server, client, bytes) in [
            (outcome(1, "server says"), outcome(0, "x"), 1),
            (outcome(0, ""), outcome(2, "x"), 1),
            (outcome(0, ""), outcome(0, "y"), 1),
            (outcome(0, ""), outcome(0, "x"), 1 << 16),
        ] {
            let bad = bw.judge(Some(&server), Some(&client), &counted(bytes));
            assert!(!bad.ok && bad.got != "pass", "{bad:?}");
        }
        // A condition has no value if the target of some of the device's payload is unknown, for a NIC and for a drive.
        let condition = |text: &str, device: Value| Condition::parse(text).unwrap().value(&json!({"b": {"x": device}}));
        let nic = |astray: u64| json!({"counters": {"payload": {"host_read": 0, "message_read": 0, "message_written": astray}}});
        let drive = |astray: u64| json!({"payload": {"unknown": astray}, "read": {"host": 0}});
        for (text, device) in [
            ("b.x.payload.host_read == 0", &nic as &dyn Fn(u64) -> Value),
            ("b.x.read.host == 0", &drive),
        ] {
            assert_eq!(condition(text, device(0)).unwrap(), 0);
            let error = condition(text, device(8)).unwrap_err().to_string();
            assert!(error.contains("8 bytes moved from or to unknown addresses"), "{error}");
        }
        assert!(!bw.judge(Some(&outcome(0, "")), Some(&outcome(0, "x")), &json!({})).ok);
        assert!(!bw.judge(Some(&outcome(0, "")), None, &counted(1)).ok);
        let mut said = outcome(0, "x");
        said.findings.push("BUG".into());
        assert!(!bw.judge(Some(&outcome(0, "")), Some(&said), &counted(1)).ok);

        let rping = &table.clients[4];
        let failed = rping.judge(Some(&outcome(1, "")), Some(&outcome(3, "no")), &json!({}));
        assert!(failed.ok && failed.got == "exit 3", "{failed:?}");
        assert!(!rping.judge(None, Some(&outcome(0, "")), &json!({})).ok);
    }

    #[test]
    fn clients_that_do_not_run_have_a_reason() {
        let table = Table::parse("t", TABLE).unwrap();
        let skipped = |index: usize, long, debug| table.clients[index].skipped(long, debug);
        for (long, debug) in [(false, false), (false, true), (true, false), (true, true)] {
            assert_eq!(skipped(0, long, debug), None);
            assert_eq!(skipped(5, long, debug), Some("no such hardware".into()));
            assert_eq!(skipped(6, long, debug).is_some(), !long);
            assert_eq!(skipped(7, long, debug).is_some(), !long && debug);
        }
    }

    /// A row of the client `index` of [`TABLE`] on the stock kernel.
    fn row(index: usize, results: Results) -> Report {
        Report {
            kernel: "stock".into(),
            table: "t".into(),
            ..Table::parse("t", TABLE).unwrap().clients[index].report(results)
        }
    }

    #[test]
    fn reports_have_all_clients_with_all_attempts() {
        let skipped = NotRun::Skipped("no such hardware".into());
        let mut reports = Reports::default();
        for index in 0..8 {
            reports.add(row(index, Results::NotRun(NotRun::NotSelected)));
        }
        reports.not_run("stock", "t", "other", &skipped).unwrap();
        let bad = Attempt::prevented("the guests did not boot");
        let good = Attempt {
            ok: true,
            got: "pass".into(),
            seconds: 1.0,
            evidence: vec!["x: 1".into()],
        };
        for attempt in [&bad, &good] {
            reports.add(row(4, Results::Attempts(vec![attempt.clone()])));
        }
        // A client with attempts has run.
        reports.not_run("stock", "t", "rping", &NotRun::NotStarted).unwrap();
        reports.not_run("stock", "t", "slow", &NotRun::NotStarted).unwrap();
        reports
            .not_run("stock", "t", "slow on debug", &NotRun::PassedBefore)
            .unwrap();
        assert!(reports.not_run("debug", "t", "slow", &NotRun::NotStarted).is_err());

        let rows = serde_json::to_value(reports.rows()).unwrap();
        let rows = rows.as_array().unwrap();
        assert_eq!(rows.len(), 8);
        let of = |client: &str| rows.iter().find(|row| row["client"] == client).unwrap();
        assert_eq!(
            of("rping"),
            &json!({
                "kernel": "stock", "table": "t", "client": "rping", "command": "b: rping -s\na: rping -c",
                "expected": "exit 3: it cannot",
                "attempts": [
                    { "ok": false, "got": "not run: the guests did not boot", "seconds": 0.0 },
                    { "ok": true, "got": "pass", "seconds": 1.0, "evidence": ["x: 1"] },
                ],
            })
        );
        for (client, reason) in [
            ("ib_write_bw", "not_selected"),
            ("other", "skipped: no such hardware"),
            ("slow", "not_started"),
            ("slow on debug", "passed_before"),
        ] {
            let row = of(client);
            assert!(row["not_run"] == reason && row.get("attempts").is_none(), "{row}");
        }
    }

    #[test]
    fn all_tables_of_the_test_bed_load() {
        let mut count = 0;
        for entry in fs::read_dir(tables()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "toml") {
                count += Table::load(&path).unwrap().clients.len();
            }
        }
        assert!(count > 0);
    }
}
