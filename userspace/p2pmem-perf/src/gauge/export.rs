// SPDX-License-Identifier: MIT OR Apache-2.0

//! The results as a table of comma-separated values.

use super::state::{Ended, Results};
use crate::matrix::Entry;
use crate::stats::{Latency, Speed};

/// The columns.
const COLUMNS: &str = "kind,id,from,to,mode,nic,bytes,messages,mib_per_s,ratio_to_link,p50_us,p99_us,p999_us,max_us,\
                       cpu_us_client,cpu_us_server,copied_bytes,verified,error";

/// The name of the line of all NICs together.
const ALL: &str = "all";

/// Returns the results: one line for each size and NIC of a run, and one for each size and pair of the matrix.
pub(super) fn csv(results: &Results) -> String {
    let mut lines = vec![COLUMNS.to_owned()];
    for run in &results.runs {
        lines.extend(run_lines(run));
    }
    if let Some(state) = &results.matrix {
        lines.extend(state.matrix.entries.iter().map(|entry| entry_line(state.id, entry)));
    }
    lines.join("\r\n") + "\r\n"
}

/// Returns a field, in quotes if it has a character that separates.
fn field(text: &str) -> String {
    if text.contains(['"', ',', '\r', '\n']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

fn line(fields: &[String]) -> String {
    let fields: Vec<_> = fields.iter().map(|text| field(text)).collect();
    fields.join(",")
}

fn latency_fields(latency: Option<&Latency>) -> [String; 4] {
    latency.map_or_else(Default::default, |latency| {
        [latency.p50_us, latency.p99_us, latency.p999_us, latency.max_us].map(|us| us.to_string())
    })
}

/// Returns the processor times of both sides. That of the server is empty if no thread of it takes part.
fn processor_fields(client: f64, server: Option<f64>) -> [String; 2] {
    [Some(client), server].map(|us| us.map(|us| us.to_string()).unwrap_or_default())
}

fn verified_field(verified: Option<bool>) -> String {
    verified.map(|correct| correct.to_string()).unwrap_or_default()
}

/// Returns the fields that each line of a run begins with.
fn run_fields(run: &Ended, nic: &str) -> Vec<String> {
    let names = [&run.from, &run.to, &run.mode].map(Clone::clone);
    let mut fields = vec!["run".to_owned(), run.id.to_string()];
    fields.extend(names);
    fields.push(nic.to_owned());
    fields
}

fn speed_fields(speed: &Speed) -> [String; 4] {
    [
        speed.bytes.to_string(),
        speed.iterations.to_string(),
        speed.average_mib_per_s.to_string(),
        String::new(),
    ]
}

fn run_lines(run: &Ended) -> Vec<String> {
    let error = run.error.clone().unwrap_or_default();
    let mut lines = Vec::new();
    for result in run.report.iter().flat_map(|report| &report.results) {
        if result.nics.len() > 1 {
            let mut fields = run_fields(run, ALL);
            fields.extend(speed_fields(&result.speed));
            fields.extend(latency_fields(result.latency.as_ref()));
            fields.extend([String::new(), String::new(), String::new()]);
            fields.extend([verified_field(result.verified), error.clone()]);
            lines.push(line(&fields));
        }
        for nic in &result.nics {
            let mut fields = run_fields(run, &nic.nic);
            fields.extend(speed_fields(&nic.speed));
            fields.extend(latency_fields(nic.latency.as_ref()));
            fields.extend(processor_fields(nic.cpu_us_client, nic.cpu_us_server));
            fields.push((nic.copied_client + nic.copied_server).to_string());
            let verified = nic.checked.as_ref().map(|checked| checked.is_correct());
            fields.extend([verified_field(verified), error.clone()]);
            lines.push(line(&fields));
        }
    }
    if lines.is_empty() {
        let mut fields = run_fields(run, "");
        fields.extend(std::iter::repeat_n(String::new(), 12));
        fields.push(error);
        lines.push(line(&fields));
    }
    lines
}

fn entry_line(id: u64, entry: &Entry) -> String {
    let mut fields = vec!["matrix".to_owned(), id.to_string()];
    fields.extend([&entry.from, &entry.to, &entry.mode].map(Clone::clone));
    fields.extend([ALL.to_owned(), entry.size.to_string()]);
    match &entry.measured {
        Some(one) => {
            // The messages of all NICs.
            fields.push((one.moved_bytes / entry.size.max(1)).to_string());
            fields.extend([one.mib_per_s, one.ratio_to_link].map(|number| number.to_string()));
            fields.extend(latency_fields(one.latency.as_ref()));
            fields.extend(processor_fields(one.cpu_us_client, one.cpu_us_server));
            fields.extend([one.copied_bytes.to_string(), verified_field(one.verified)]);
        }
        None => fields.extend(std::iter::repeat_n(String::new(), 11)),
    }
    fields.push(entry.error.clone().unwrap_or_default());
    line(&fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_with_separators_have_quotes() {
        assert_eq!(field("plain"), "plain");
        assert_eq!(field("a, \"b\""), "\"a, \"\"b\"\"\"");
        assert_eq!(field("two\nlines"), "\"two\nlines\"");
    }

    #[test]
    fn a_server_that_takes_no_part_has_no_processor_time() {
        assert_eq!(processor_fields(0.5, Some(2.0)), ["0.5", "2"]);
        assert_eq!(processor_fields(0.5, None), ["0.5", ""]);
    }

    #[test]
    fn each_line_has_all_columns() {
        let columns = COLUMNS.split(',').count();
        let entry = Entry {
            from: "cpu".into(),
            to: "cmb".into(),
            mode: "write".into(),
            size: 1 << 20,
            measured: None,
            error: Some("no such memory".into()),
        };
        let text = entry_line(3, &entry);
        assert_eq!(text.split(',').count(), columns, "{text}");
        assert!(text.starts_with("matrix,3,cpu,cmb,write,all,1048576,"), "{text}");
    }
}
