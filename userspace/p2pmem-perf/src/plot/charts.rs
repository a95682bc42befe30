// SPDX-License-Identifier: MIT OR Apache-2.0

//! The charts.

use std::collections::BTreeMap;

use p2pmem::short_size;

use super::canvas::{color, number, Anchor, Axis, Drawing, Panel, Scale, INK, QUIET, WIDTH};
use super::data::{Call, Curve, Document, Entry, Path, PathCost, Ports};

/// The left and the right margin of panels, which labels need.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;

/// Adds a value to a list if it is new, and returns its number.
fn index<T: PartialEq + Clone>(list: &mut Vec<T>, value: &T) -> usize {
    match list.iter().position(|other| other == value) {
        Some(number) => number,
        None => {
            list.push(value.clone());
            list.len() - 1
        }
    }
}

/// Draws the rate and the latency of a run against the size.
pub(super) fn run(drawing: &mut Drawing, document: &Document) {
    let results = &document.results;
    if results.is_empty() {
        return;
    }
    let mut title = "Rate and latency against message size".to_owned();
    if let (Some(client), Some(server), Some(test)) = (&document.client, &document.server, &document.test) {
        let mode = if test.staged {
            "staged write"
        } else {
            test.mode.as_str()
        };
        title = format!("{mode}, {} to {}", client.memory(), server.memory());
    }
    let top = drawing.chart(&title, 290.0) + 24.0;
    let sizes: Vec<f64> = results.iter().map(|result| result.speed.bytes as f64).collect();
    // With many sizes, not every size has a label.
    let every = sizes.len().div_ceil(6);
    let ticks: Vec<_> = results
        .iter()
        .step_by(every)
        .map(|result| (result.speed.bytes as f64, short_size(result.speed.bytes)))
        .collect();
    let width = (WIDTH - 2.0 * (LEFT + RIGHT)) / 2.0;
    let panel = |number: f64, y: Axis| Panel {
        left: LEFT + number * (width + LEFT + RIGHT),
        top,
        width,
        height: 200.0,
        x: Axis::new(Scale::Log, sizes.iter().copied()),
        y,
    };
    let rates: Vec<_> = results
        .iter()
        .map(|result| (result.speed.bytes as f64, result.speed.average_mib_per_s))
        .collect();
    let rate = panel(0.0, Axis::new(Scale::Linear, rates.iter().map(|(_, rate)| *rate)));
    rate.frame(drawing, "message size, bytes", "MiB/s", &ticks);
    rate.series(drawing, &rates, color(0), true);

    let names = ["median", "99 %", "99.9 %"].map(str::to_owned);
    let lines = [0, 1, 2].map(|number| {
        let points = results.iter().filter_map(|result| {
            let latency = result.latency.as_ref()?;
            let values = [latency.p50_us, latency.p99_us, latency.p999_us];
            Some((result.speed.bytes as f64, values[number]))
        });
        points.collect::<Vec<_>>()
    });
    let values = lines.iter().flatten().map(|(_, value)| *value);
    let latency = panel(1.0, Axis::new(Scale::Log, values));
    latency.frame(drawing, "message size, bytes", "latency, µs", &ticks);
    for (number, points) in lines.iter().enumerate() {
        latency.series(drawing, points, color(number), true);
    }
    drawing.legend(latency.left, top + 250.0, &names);
}

/// Returns the color of a ratio: from white to blue.
fn heat(ratio: f64) -> String {
    let part = ratio.clamp(0.0, 1.0) * 0.75;
    let mix = |full: f64| (255.0 + (full - 255.0) * part).round() as u8;
    format!("#{:02x}{:02x}{:02x}", mix(29.0), mix(95.0), mix(168.0))
}

/// Draws a heat map for each mode and size of a matrix.
pub(super) fn matrix(drawing: &mut Drawing, entries: &[Entry]) {
    let (mut maps, mut rows, mut columns) = (Vec::new(), Vec::new(), Vec::new());
    for entry in entries {
        index(&mut maps, &(entry.size, entry.mode.clone()));
        index(&mut rows, &entry.from);
        index(&mut columns, &entry.to);
    }
    const CELL: (f64, f64) = (62.0, 34.0);
    const HEAD: f64 = 84.0;
    let width = HEAD + CELL.0 * columns.len() as f64 + 14.0;
    let height = CELL.1 * rows.len() as f64 + 50.0;
    let in_row = (((WIDTH - 20.0) / width) as usize).clamp(1, 4);
    let lines = maps.len().div_ceil(in_row);
    let top = drawing.chart(
        "Ratio to the link's rate, and MiB/s; rows: client's memory, columns: server's",
        height * lines as f64 + 8.0,
    );
    let names = |text: &str| -> String { text.chars().take(11).collect() };
    for (number_of_map, (size, mode)) in maps.iter().enumerate() {
        let left = 16.0 + (number_of_map % in_row) as f64 * width;
        let top = top + (number_of_map / in_row) as f64 * height + 12.0;
        let title = format!("{mode}, {}", short_size(*size));
        drawing.text_of(left, top, &title, Anchor::Start, 12.0, INK, true);
        for (number, column) in columns.iter().enumerate() {
            let x = left + HEAD + (number as f64 + 0.5) * CELL.0;
            drawing.text_of(x, top + 18.0, &names(column), Anchor::Middle, 10.0, QUIET, false);
        }
        for (number, row) in rows.iter().enumerate() {
            let y = top + 24.0 + (number as f64 + 0.5) * CELL.1 + 4.0;
            drawing.text_of(left + HEAD - 6.0, y, &names(row), Anchor::End, 10.0, QUIET, false);
        }
        for entry in entries
            .iter()
            .filter(|entry| entry.size == *size && entry.mode == *mode)
        {
            let (row, column) = (index(&mut rows, &entry.from), index(&mut columns, &entry.to));
            let (x, y) = (left + HEAD + column as f64 * CELL.0, top + 24.0 + row as f64 * CELL.1);
            let about = format!("{} to {}, {mode}", entry.from, entry.to);
            let (center, middle) = (x + CELL.0 / 2.0, y + CELL.1 / 2.0);
            let (fill, ratio, rate) = match (entry.ratio_to_link, entry.mib_per_s) {
                (Some(ratio), Some(rate)) => (heat(ratio), format!("{ratio:.2}"), number(rate)),
                _ => ("#eeeeee".to_owned(), "–".to_owned(), String::new()),
            };
            drawing.rectangle(x + 1.0, y + 1.0, CELL.0 - 2.0, CELL.1 - 2.0, &fill, &about);
            drawing.text_of(center, middle - 1.0, &ratio, Anchor::Middle, 12.0, INK, true);
            drawing.text_of(center, middle + 12.0, &rate, Anchor::Middle, 9.0, INK, false);
        }
    }
}

/// Draws the latency of calls against the processor time of both sides: one color for each kind of waiting, a line from one
/// to the other for each call and size.
pub(super) fn rpc(drawing: &mut Drawing, calls: &[Call]) {
    if calls.is_empty() {
        return;
    }
    let mut waits = Vec::new();
    // The processor time, the latency, and the number of the kind of waiting.
    type Point = (f64, f64, usize);
    let mut groups: BTreeMap<(u64, &str), Vec<Point>> = BTreeMap::new();
    for call in calls {
        let wait = index(&mut waits, &call.waiting);
        let cpu = call.cpu_us_client + call.cpu_us_server;
        let points = groups.entry((call.bytes, call.name.as_str())).or_default();
        points.push((cpu, call.p50_us, wait));
    }
    let height = 340.0;
    let top = drawing.chart(
        "Latency of a call against the processor time of both sides",
        height + 90.0,
    ) + 24.0;
    let all = || groups.values().flatten();
    let x = Axis::new(Scale::Log, all().map(|(cpu, _, _)| *cpu));
    let panel = Panel {
        left: LEFT,
        top,
        width: WIDTH - LEFT - 130.0,
        height,
        y: Axis::new(Scale::Log, all().map(|(_, latency, _)| *latency)),
        x,
    };
    let ticks: Vec<_> = panel
        .x
        .ticks()
        .into_iter()
        .map(|value| (value, number(value)))
        .collect();
    panel.frame(drawing, "processor time of a call, µs", "median latency, µs", &ticks);
    // Labels at the same height would cover each other.
    let mut labels: Vec<(f64, String)> = Vec::new();
    for ((bytes, name), points) in &groups {
        let line: Vec<_> = points.iter().map(|(cpu, latency, _)| (*cpu, *latency)).collect();
        panel.series(drawing, &line, "#b8c2cb", false);
        let mut right = (0.0, 0.0);
        for (cpu, latency, wait) in points {
            let (x, y) = panel.at(*cpu, *latency);
            let about = format!("{name}, {}, {}", short_size(*bytes), waits[*wait]);
            panel.mark(drawing, x, y, 4.5, color(*wait), &about);
            if x >= right.0 {
                right = (x, y);
            }
        }
        labels.push((right.1, format!("{name} {}", short_size(*bytes))));
        let near = |y: f64| labels.iter().rev().skip(1).any(|(other, _)| (other - y).abs() < 11.0);
        let mut y = right.1;
        while near(y) {
            y += 11.0;
        }
        if let Some(last) = labels.last_mut() {
            last.0 = y;
            let text = last.1.clone();
            drawing.text_of(right.0 + 8.0, y + 3.0, &text, Anchor::Start, 10.0, QUIET, false);
        }
    }
    drawing.legend(LEFT, top + height + 50.0, &waits);
}

/// A bar of parts that follow one another.
struct Stack<'a> {
    name: &'a str,
    parts: Vec<(&'a str, f64)>,
    /// The number beside the bar. It can differ from the sum of the parts.
    total: f64,
}

/// Draws bars of parts, with one color for each name of a part.
fn stacks(drawing: &mut Drawing, title: &str, unit: &str, stacks: &[Stack<'_>]) {
    if stacks.is_empty() {
        return;
    }
    const BAR: f64 = 26.0;
    let mut names: Vec<String> = Vec::new();
    for (name, _) in stacks.iter().flat_map(|stack| &stack.parts) {
        index(&mut names, &(*name).to_owned());
    }
    let height = stacks.len() as f64 * (BAR + 12.0);
    let legend = 16.0 * names.len().div_ceil(3) as f64;
    let top = drawing.chart(title, height + legend + 60.0) + 14.0;
    let sum = |stack: &Stack<'_>| stack.parts.iter().map(|(_, value)| value.max(0.0)).sum::<f64>();
    let panel = Panel {
        left: 200.0,
        top,
        width: WIDTH - 200.0 - 90.0,
        height,
        x: Axis::new(Scale::Linear, stacks.iter().map(sum)),
        y: Axis::new(Scale::Linear, [0.0]),
    };
    let ticks = panel.x.ticks();
    for tick in &ticks {
        let (x, _) = panel.at(*tick, 0.0);
        drawing.rectangle(x, top, 1.0, height, "#d5dbe1", "");
        drawing.text_of(
            x,
            top + height + 14.0,
            &number(*tick),
            Anchor::Middle,
            10.0,
            QUIET,
            false,
        );
    }
    drawing.text(panel.left + panel.width, top + height + 30.0, unit, Anchor::End);
    for (row, stack) in stacks.iter().enumerate() {
        let y = top + row as f64 * (BAR + 12.0) + 6.0;
        drawing.text(panel.left - 8.0, y + BAR / 2.0 + 4.0, stack.name, Anchor::End);
        let mut sum = 0.0;
        for (name, value) in &stack.parts {
            let number_of_part = index(&mut names, &(*name).to_owned());
            let (from, _) = panel.at(sum, 0.0);
            sum += value.max(0.0);
            let (to, _) = panel.at(sum, 0.0);
            let about = format!("{name}: {} {unit}", number(*value));
            drawing.rectangle(from, y, to - from, BAR, color(number_of_part), &about);
        }
        let (end, _) = panel.at(sum, 0.0);
        let text = format!("{} {unit}", number(stack.total));
        drawing.text_of(end + 6.0, y + BAR / 2.0 + 4.0, &text, Anchor::Start, 11.0, INK, true);
    }
    drawing.legend(16.0, top + height + 50.0, &names);
}

/// Draws what the time of a transfer consists of.
pub(super) fn decomposition(drawing: &mut Drawing, paths: &[Path]) {
    let sum = |path: &Path| path.terms.iter().map(|term| term.us.max(0.0)).sum();
    let bars: Vec<_> = paths
        .iter()
        .map(|path| Stack {
            name: &path.name,
            parts: path.terms.iter().map(|term| (term.term.as_str(), term.us)).collect(),
            total: path.total_us.unwrap_or_else(|| sum(path)),
        })
        .collect();
    stacks(drawing, "Where the time of a transfer goes", "µs", &bars);
}

/// Draws the bytes that each path moves a byte of payload by, in addition to the wire.
pub(super) fn formula(drawing: &mut Drawing, paths: &[PathCost]) {
    let bars: Vec<_> = paths
        .iter()
        .map(|path| {
            let parts = vec![
                ("copied by the program", path.copied_by_program.unwrap_or(0.0)),
                ("copied by the kernel", path.copied_by_kernel),
                ("through a root complex", path.root_complex),
            ];
            Stack {
                name: &path.name,
                total: parts.iter().map(|(_, bytes)| bytes).sum(),
                parts,
            }
        })
        .collect();
    stacks(drawing, "Bytes that are moved for a byte of payload", "bytes", &bars);
}

/// Draws the rates of one port and of two.
pub(super) fn multi_port(drawing: &mut Drawing, ports: &Ports) {
    let bars: Vec<_> = [
        ("one port", ports.single_mib_per_s),
        ("two ports, one process", ports.one_process_mib_per_s),
        ("two ports, two processes", ports.two_processes_mib_per_s),
    ]
    .into_iter()
    .map(|(name, rate)| Stack {
        name,
        parts: vec![("rate", rate)],
        total: rate,
    })
    .collect();
    stacks(drawing, "Rate of one port and of two", "MiB/s", &bars);
}

/// Draws the average rate of a stream, and the lowest and the highest rolling average.
pub(super) fn stream(drawing: &mut Drawing, document: &Document) {
    let rates = [
        ("lowest rolling average", document.rolling_min_mib_per_s),
        ("average", document.average_mib_per_s),
        ("highest rolling average", document.rolling_max_mib_per_s),
    ];
    let rates: Vec<_> = rates
        .into_iter()
        .filter_map(|(name, rate)| Some((name, rate?)))
        .collect();
    if rates.is_empty() {
        return;
    }
    let top = drawing.chart("Rate of the stream, MiB/s", 34.0 * rates.len() as f64 + 10.0);
    let axis = Axis::new(Scale::Linear, rates.iter().map(|(_, rate)| *rate));
    for (row, (name, rate)) in rates.iter().enumerate() {
        let y = top + 34.0 * row as f64 + 6.0;
        let width = axis.place(*rate) * (WIDTH - 170.0 - 90.0);
        drawing.text(162.0, y + 17.0, name, Anchor::End);
        drawing.rectangle(170.0, y, width, 24.0, color(0), &number(*rate));
        drawing.text_of(176.0 + width, y + 17.0, &number(*rate), Anchor::Start, 11.0, INK, true);
    }
}

/// Draws the loss of a training against its epochs.
pub(super) fn losses(drawing: &mut Drawing, curve: &Curve) {
    if curve.losses.is_empty() {
        return;
    }
    let title = format!("Loss of {} training on {} ranks", curve.mode, curve.ranks);
    let top = drawing.chart(&title, 290.0);
    let all = std::iter::once(&curve.initial_loss).chain(&curve.losses);
    let points: Vec<(f64, f64)> = (0..).map(f64::from).zip(all.copied()).collect();
    let panel = Panel {
        left: LEFT,
        top: top + 20.0,
        width: WIDTH - LEFT - RIGHT,
        height: 220.0,
        x: Axis::new(Scale::Linear, [curve.losses.len() as f64]),
        y: Axis::new(Scale::Linear, points.iter().map(|(_, loss)| *loss)),
    };
    let ticks = panel.x.ticks().into_iter().filter(|epoch| epoch.fract() == 0.0);
    let ticks: Vec<(f64, String)> = ticks.map(|epoch| (epoch, number(epoch))).collect();
    panel.frame(drawing, "epochs", "loss", &ticks);
    panel.series(drawing, &points, color(0), true);
}
