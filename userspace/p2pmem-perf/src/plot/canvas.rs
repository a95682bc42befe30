// SPDX-License-Identifier: MIT OR Apache-2.0

//! Axes, lines, and text in an SVG document. Styles are attributes of the elements, so that every program that converts SVG
//! for papers understands them.

use svg::node::element::{Circle, Group, Line, Polyline, Rectangle, Text, Title};
use svg::node::Node;
use svg::Document;

/// Width of the document.
pub(super) const WIDTH: f64 = 760.0;
const MARGIN: f64 = 16.0;
const FONT: &str = "Helvetica, Arial, sans-serif";
pub(super) const INK: &str = "#17202a";
pub(super) const QUIET: &str = "#4a5763";
const GRID: &str = "#d5dbe1";
/// Colors that differ in lightness, too.
pub(super) const COLORS: [&str; 8] = [
    "#1d5fa8", "#e08214", "#1c6b3c", "#b694d6", "#7a5c00", "#a31621", "#4bb3c3", "#5b6770",
];

/// Returns the color with this number.
pub(super) fn color(number: usize) -> &'static str {
    COLORS[number % COLORS.len()]
}

/// Where text is relative to its place.
#[derive(Debug, Clone, Copy)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// Charts, one below the other.
#[derive(Debug, Default)]
pub(super) struct Drawing {
    group: Group,
    bottom: f64,
    is_used: bool,
}

impl Drawing {
    pub(super) fn is_empty(&self) -> bool {
        !self.is_used
    }

    /// Begins a chart of this height below the others. Returns the top of its content, below its title.
    pub(super) fn chart(&mut self, title: &str, height: f64) -> f64 {
        let top = self.bottom + MARGIN;
        self.is_used = true;
        self.bottom = top + 26.0 + height;
        self.text_of(MARGIN, top + 14.0, title, Anchor::Start, 15.0, INK, true);
        top + 26.0
    }

    pub(super) fn add(&mut self, node: impl Into<Box<dyn Node>>) {
        self.group.append(node);
    }

    pub(super) fn text(&mut self, x: f64, y: f64, text: &str, anchor: Anchor) {
        self.text_of(x, y, text, anchor, 11.0, INK, false);
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn text_of(&mut self, x: f64, y: f64, text: &str, anchor: Anchor, size: f64, fill: &str, is_bold: bool) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let mut element = Text::new(text)
            .set("x", round(x))
            .set("y", round(y))
            .set("font-size", size)
            .set("fill", fill)
            .set("text-anchor", anchor);
        if is_bold {
            element = element.set("font-weight", "bold");
        }
        self.add(element);
    }

    /// Adds a rectangle with a title that viewers show.
    pub(super) fn rectangle(&mut self, x: f64, y: f64, width: f64, height: f64, fill: &str, about: &str) {
        let rectangle = Rectangle::new()
            .set("x", round(x))
            .set("y", round(y))
            .set("width", round(width.max(0.0)))
            .set("height", round(height))
            .set("fill", fill)
            .add(Title::new(about));
        self.add(rectangle);
    }

    /// Adds the names of series in one line, with their colors. Returns the y below them.
    pub(super) fn legend(&mut self, x: f64, y: f64, names: &[String]) -> f64 {
        let (mut at, mut line) = (x, y);
        for (number, name) in names.iter().enumerate() {
            let width = 30.0 + 6.3 * name.chars().count() as f64;
            if at > x && at + width > WIDTH - MARGIN {
                (at, line) = (x, line + 16.0);
            }
            self.rectangle(at, line - 9.0, 10.0, 10.0, color(number), name);
            self.text(at + 14.0, line, name, Anchor::Start);
            at += width;
        }
        line + 12.0
    }

    /// Returns the document.
    pub(super) fn svg(self) -> String {
        let height = round(self.bottom + MARGIN);
        let page = Rectangle::new()
            .set("width", WIDTH)
            .set("height", height)
            .set("fill", "#ffffff");
        Document::new()
            .set("viewBox", (0, 0, WIDTH, height))
            .set("width", WIDTH)
            .set("height", height)
            .set("font-family", FONT)
            .set("role", "img")
            .add(Title::new("Report of p2pmem-perf"))
            .add(page)
            .add(self.group)
            .to_string()
            + "\n"
    }
}

/// Rounds a place, so that the document is short.
fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// How values lie on an axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Scale {
    /// From zero.
    Linear,
    /// Logarithmic; values that are not positive lie at the beginning.
    Log,
}

/// An axis of values.
#[derive(Debug, Clone)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
}

impl Axis {
    /// Returns an axis that has all values.
    pub(super) fn new(scale: Scale, values: impl IntoIterator<Item = f64>) -> Self {
        let valid = values.into_iter().filter(|value| value.is_finite());
        match scale {
            Scale::Linear => {
                let high = valid.fold(0.0, f64::max);
                let high = if high > 0.0 { high * 1.05 } else { 1.0 };
                Self { scale, low: 0.0, high }
            }
            Scale::Log => {
                let (low, high) = valid
                    .filter(|value| *value > 0.0)
                    .fold((f64::INFINITY, 0.0), |(low, high), value| {
                        (f64::min(low, value), f64::max(high, value))
                    });
                if high > 0.0 {
                    // A margin, so that no mark lies on the frame.
                    let (low, high) = (low / 1.3, high * 1.3);
                    Self { scale, low, high }
                } else {
                    Self {
                        scale,
                        low: 0.1,
                        high: 1.0,
                    }
                }
            }
        }
    }

    /// Returns the place of a value, from 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value <= self.low => 0.0,
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        };
        part.clamp(0.0, 1.0)
    }

    /// Returns values with lines and labels: four to ten.
    pub(super) fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let rough = self.high / 5.0;
                let power = 10f64.powf(rough.log10().floor());
                let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power);
                let step = step.into_iter().find(|step| *step >= rough).unwrap_or(rough);
                (0..=10)
                    .map(|number| f64::from(number) * step)
                    .take_while(|value| *value <= self.high * 1.0001)
                    .collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10();
                let factors: &[f64] = if decades > 2.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let first = self.low.log10().floor() as i32;
                let last = self.high.log10().ceil() as i32;
                let every = usize::try_from((last - first) / 10).unwrap_or(0) + 1;
                let ticks: Vec<f64> = (first..=last)
                    .step_by(every)
                    .flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)))
                    .filter(|value| (self.low..=self.high).contains(value))
                    .collect();
                if ticks.len() > 1 {
                    return ticks;
                }
                // All values are between two of these numbers.
                let step = 10f64.powf((self.high - self.low).log10().floor());
                let first = (self.low / step).ceil();
                (0..10)
                    .map(|number| (first + f64::from(number)) * step)
                    .take_while(|value| *value <= self.high)
                    .collect()
            }
        }
    }
}

/// Returns a number with few digits.
pub(super) fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let text = match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// A part of a chart with two axes.
#[derive(Debug)]
pub(super) struct Panel {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) x: Axis,
    pub(super) y: Axis,
}

impl Panel {
    /// Returns the place of a pair of values.
    pub(super) fn at(&self, x: f64, y: f64) -> (f64, f64) {
        (
            self.left + self.x.place(x) * self.width,
            self.top + (1.0 - self.y.place(y)) * self.height,
        )
    }

    /// Draws the frame, the lines, and the labels. `x_ticks` has the values of the horizontal axis with their labels.
    pub(super) fn frame(&self, drawing: &mut Drawing, x_name: &str, y_name: &str, x_ticks: &[(f64, String)]) {
        let line = |from: (f64, f64), to: (f64, f64), stroke: &str| {
            Line::new()
                .set("x1", round(from.0))
                .set("y1", round(from.1))
                .set("x2", round(to.0))
                .set("y2", round(to.1))
                .set("stroke", stroke)
                .set("stroke-width", 1)
        };
        let (right, bottom) = (self.left + self.width, self.top + self.height);
        for value in self.y.ticks() {
            let y = self.top + (1.0 - self.y.place(value)) * self.height;
            drawing.add(line((self.left, y), (right, y), GRID));
            drawing.text_of(
                self.left - 5.0,
                y + 4.0,
                &number(value),
                Anchor::End,
                10.0,
                QUIET,
                false,
            );
        }
        for (value, label) in x_ticks {
            let x = self.left + self.x.place(*value) * self.width;
            drawing.add(line((x, self.top), (x, bottom), GRID));
            drawing.text_of(x, bottom + 14.0, label, Anchor::Middle, 10.0, QUIET, false);
        }
        drawing.add(line((self.left, self.top), (self.left, bottom), QUIET));
        drawing.add(line((self.left, bottom), (right, bottom), QUIET));
        drawing.text(self.left - 40.0, self.top - 8.0, y_name, Anchor::Start);
        drawing.text(right, bottom + 30.0, x_name, Anchor::End);
    }

    /// Draws a line through points, and a mark at each.
    pub(super) fn series(&self, drawing: &mut Drawing, points: &[(f64, f64)], stroke: &str, has_marks: bool) {
        let places: Vec<_> = points.iter().map(|(x, y)| self.at(*x, *y)).collect();
        let text: Vec<_> = places
            .iter()
            .map(|(x, y)| format!("{},{}", round(*x), round(*y)))
            .collect();
        let line = Polyline::new()
            .set("points", text.join(" "))
            .set("fill", "none")
            .set("stroke", stroke)
            .set("stroke-width", 2);
        drawing.add(line);
        if has_marks {
            for ((x, y), (_, value)) in places.iter().zip(points) {
                self.mark(drawing, *x, *y, 3.0, stroke, &number(*value));
            }
        }
    }

    /// Draws a mark with a title that viewers show.
    pub(super) fn mark(&self, drawing: &mut Drawing, x: f64, y: f64, radius: f64, fill: &str, about: &str) {
        let circle = Circle::new()
            .set("cx", round(x))
            .set("cy", round(y))
            .set("r", radius)
            .set("fill", fill)
            .add(Title::new(about));
        drawing.add(circle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_a_few_ticks_within_their_limits() {
        for (scale, values) in [
            (Scale::Linear, vec![0.0, 23_757.0]),
            (Scale::Linear, vec![0.003]),
            (Scale::Linear, vec![]),
            (Scale::Log, vec![1.9, 2.4]),
            (Scale::Log, vec![3.1, 3.5]),
            (Scale::Log, vec![0.01, 90_000.0]),
            (Scale::Log, vec![1e-9, 1e9]),
            (Scale::Log, vec![0.0, f64::NAN, -1.0]),
        ] {
            let axis = Axis::new(scale, values.clone());
            let ticks = axis.ticks();
            assert!((1..=12).contains(&ticks.len()), "{scale:?} {values:?}: {ticks:?}");
            for tick in ticks {
                assert!((0.0..=1.0).contains(&axis.place(tick)), "{scale:?} {tick}");
            }
            for value in values.into_iter().filter(|value| value.is_finite()) {
                assert!((0.0..=1.0).contains(&axis.place(value)), "{scale:?} {value}");
            }
        }
    }

    #[test]
    fn numbers_have_few_digits() {
        let texts = [0.0, 23_757.4, 100.0, 12.34, 1.5, 2.0, 0.0123].map(number);
        assert_eq!(texts, ["0", "23757", "100", "12.3", "1.5", "2", "0.0123"]);
    }
}
