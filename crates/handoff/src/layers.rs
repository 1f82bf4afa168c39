//! Counts the KV cache regions that a forward pass has filled, from the names of the layers that it has computed.

/// The layers of a rank in the order of their regions. A model computes them in this order. A layer that comes early counts
/// once all layers before it are done.
#[derive(Clone, Debug)]
pub struct LayerOrder {
    layers: Vec<Layer>,
    /// The first so many layers are done.
    done: usize,
}

#[derive(Clone, Debug)]
struct Layer {
    name: String,
    last_region: u32,
    is_done: bool,
}

impl LayerOrder {
    /// `last_regions`: the name of each layer, and the last region that it writes.
    pub fn new(last_regions: impl IntoIterator<Item = (String, u32)>) -> LayerOrder {
        let layer = |(name, last_region)| Layer { name, last_region, is_done: false };
        let mut layers: Vec<Layer> = last_regions.into_iter().map(layer).collect();
        layers.sort_by_key(|layer| layer.last_region);
        LayerOrder { layers, done: 0 }
    }

    /// Starts a new step, in which no layer is done.
    pub fn begin(&mut self) {
        self.done = 0;
        for layer in &mut self.layers {
            layer.is_done = false;
        }
    }

    /// Marks this layer as done. Returns the number of leading regions that are done, if it has grown. An unknown name changes
    /// nothing.
    pub fn computed(&mut self, name: &str) -> Option<u32> {
        // The usual case needs no search.
        let is_next = |layer: &Layer| layer.name == name;
        if self.layers.get(self.done).is_some_and(is_next) {
            self.layers[self.done].is_done = true;
        } else {
            self.layers.iter_mut().find(|layer| layer.name == name)?.is_done = true;
        }
        let before = self.done;
        while self.layers.get(self.done).is_some_and(|layer| layer.is_done) {
            self.done += 1;
        }
        (self.done > before).then(|| self.layers[self.done - 1].last_region + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(layers: &[(&str, u32)]) -> LayerOrder {
        LayerOrder::new(layers.iter().map(|&(name, region)| (name.to_owned(), region)))
    }

    fn told_of(layers: &mut LayerOrder, names: &str) -> Vec<u32> {
        layers.begin();
        names.split("").filter_map(|name| layers.computed(name)).collect()
    }

    #[test]
    fn each_layer_in_its_order_tells_the_regions_up_to_its_last_one() {
        assert_eq!(told_of(&mut order(&[("c", 3), ("a", 0), ("b", 2)]), "abc"), [1, 3, 4]);
    }

    #[test]
    fn a_layer_before_its_turn_counts_when_those_before_it_are_done() {
        assert_eq!(told_of(&mut order(&[("a", 0), ("b", 1), ("c", 2)]), "bac"), [2, 3]);
        assert_eq!(told_of(&mut order(&[("a", 0), ("b", 1), ("c", 2)]), "bc"), []);
    }

    #[test]
    fn a_layer_that_reads_anothers_cache_changes_nothing() {
        assert_eq!(told_of(&mut order(&[("a", 0), ("b", 0), ("c", 1)]), "abc"), [1, 1, 2]);
    }

    #[test]
    fn each_step_begins_anew_and_a_layer_nobody_knows_is_passed_over() {
        let mut layers = order(&[("a", 0), ("b", 1)]);
        assert_eq!(told_of(&mut layers, "ab"), [1, 2]);
        assert_eq!(told_of(&mut layers, "axb"), [1, 2]);
        assert_eq!(told_of(&mut order(&[]), "a"), []);
    }
}
